#!/bin/sh
# Records the shipped traces anew. Run it in this folder, with the engine extra installed.
set -eu
text=$(mktemp)
trap 'rm -f "$text"' EXIT
head -c 256 ../simlab/data/text-b.txt > "$text"
record() {
    simlab record --text "$text" --budget 2cycles --threads 1 --force --out "$@"
}
record original.trace
record margin-0.15.trace --margin 0.15
record drop-0.75.trace --drop 0.75
simlab validate original.trace --budget 2cycles --margin 0,.05,.1,.15,.2,.3,.45,.6 --threads 1 --json > original.validate.json
