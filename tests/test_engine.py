"""The streamed model computes what the resident one does, and a lossy knob shows where it acts."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from live import TEXT, THREADS, cell_of, plain_logits, record, streamed_logits
from tiny_models import make_model

from simlab.errors import InputError, RunError, SimlabWarning
from simlab.record import ggml, hook, machine
from simlab.record.engine import EMBEDDED_MODEL, Engine
from simlab.record.gguf import read_gguf
from simlab.record.llama import log_probability
from simlab.record.plan import text_graphs
from simlab.record.reads import PAGE, ReadLanes, Slice, page_window
from simlab.record.recorder import Recorder
from simlab.replay.run import replay
from simlab.trace.store import TraceWriter, open_trace
from simlab.types import DECODE, PREFILL, TraceHeader

N_TOKENS = 72


@pytest.fixture(scope="module")
def engine():
    with Engine(n_threads=THREADS, lanes=3) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokens(engine):
    return engine.tokenize(TEXT)[:N_TOKENS]


@pytest.fixture(scope="module")
def plain(tokens):
    return plain_logits(tokens)


@pytest.mark.parametrize("budget", ["off", "1.2cycles", "100%"])
def test_streamed_logits_are_plain_llama_cpps_bit_for_bit(engine, tokens, plain, budget):
    engine.start(cell_of(budget))
    logits, counts = streamed_logits(engine, tokens)
    assert np.array_equal(logits, plain)
    assert counts["lookups"] > 0
    assert (counts["hits"] == 0) == (budget == "off")


@pytest.mark.parametrize("budget", ["1.2cycles", "2cycles"])
def test_an_inert_margin_examines_routings_and_changes_nothing(engine, tokens, plain, budget):
    engine.start(cell_of(budget, "substitute:L=1e-6"))
    logits, counts = streamed_logits(engine, tokens)
    assert np.array_equal(logits, plain)
    assert counts["reranked"] == 8 * 8 * (N_TOKENS - 9)  # layers x k x decode graphs
    assert counts["substituted"] == 0


def test_an_inert_drop_changes_nothing(engine, tokens, plain):
    engine.start(cell_of("1.2cycles", "drop_cold:F=1e-6"))
    logits, counts = streamed_logits(engine, tokens)
    assert np.array_equal(logits, plain)
    assert counts["dropped"] == 0


@pytest.mark.parametrize(
    ("route", "counter"), [("substitute:L=1", "substituted"), ("drop_cold:F=1", "dropped")]
)
def test_a_full_knob_fires(engine, tokens, plain, route, counter):
    engine.start(cell_of("2cycles", route))
    logits, counts = streamed_logits(engine, tokens)
    assert counts[counter] > 0
    assert np.isfinite(logits).all()
    assert not np.array_equal(logits, plain)


def test_dropping_in_prefill_acts_only_when_asked(engine, tokens):
    dropped = {}
    for prefill in (0, 1):
        engine.start(cell_of("1.2cycles", f"drop_cold:F=1,prefill={prefill}"))
        first = engine.score(tokens[:10])[0]
        assert first.plan.phase == PREFILL
        dropped[prefill] = first.tally.dropped
    assert dropped[0] == 0
    assert dropped[1] > 0


def test_the_comparison_catches_one_overwritten_expert(engine, tokens, plain):
    engine.start(cell_of("100%"))
    logits, _ = streamed_logits(engine, tokens)
    assert np.array_equal(logits, plain)
    layer, expert = next(key for key in engine.experts.slices if engine.cache.residency(key[0])[key[1]])
    engine.experts.overwrite(layer, expert, b"\x5a" * 4096)
    engine.forget_context()
    assert not np.array_equal(streamed_logits(engine, tokens)[0], plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "n_ubatch", "n_threads"),
    [({"buffered": True}, 512, 1), ({"lanes": 1}, 512, 1), ({}, 3, 1), ({}, 512, 2)],
    ids=["buffered", "one lane", "prompt in chunks", "two threads"],
)
def test_other_engine_options_change_no_logit(tokens, options, n_ubatch, n_threads):
    cut = tokens[:32]
    with Engine(n_threads=n_threads, n_ubatch=n_ubatch, **options) as engine:
        engine.start(cell_of("1.2cycles"))
        logits, _ = streamed_logits(engine, cut)
    assert np.array_equal(logits, plain_logits(cut, n_ubatch, n_threads))


def test_recording_changes_no_logit(engine, tokens, plain, tmp_path):
    trace = record(engine, tokens, cell_of("1.2cycles"), tmp_path / "t.trace")
    nll = trace.tokens.collect()["nll"].drop_nulls().to_numpy()
    expected = [-log_probability(row, t) for row, t in zip(plain[1:], tokens[9:], strict=True)]
    assert nll.tolist() == expected


def test_a_generation_records_a_row_for_every_decoded_token(engine, tmp_path):
    prompt = engine.tokenize("The module defines")
    (made,) = engine.record_generation([prompt], 12, cell_of("2cycles"), tmp_path / "g.trace")
    trace = open_trace(tmp_path / "g.trace")
    decoded = trace.tokens.collect().filter(phase=DECODE)
    assert decoded["token"].to_list() == made
    assert decoded["step"].to_list() == list(range(18, 18 + len(made)))
    assert engine.detokenize(engine.tokenize("The module  defines\n")) == b"The module  defines\n"


def test_a_session_keeps_its_cache_and_its_context_if_asked(engine, tmp_path):
    prompts = [engine.tokenize("The module defines"), engine.tokenize(" and returns")]
    engine.start(cell_of("2cycles"))
    once = engine.generate([*prompts[0], *engine.generate(prompts[0], 5), *prompts[1]], 5)
    first, second = engine.record_generation(
        prompts, 5, cell_of("2cycles"), tmp_path / "s.trace", keep_context=True
    )
    assert second == once, "the second turn goes on where the first ended"
    tokens = open_trace(tmp_path / "s.trace").tokens.collect()
    assert tokens["turn"].unique().to_list() == [0, 1]
    assert tokens.filter(turn=1)["step"].min() == 18 + 5 + len(prompts[1]) - 1
    again = engine.record_generation(prompts[:1] * 2, 5, cell_of("100%"), tmp_path / "w.trace")
    assert again == [first, first]
    warm = open_trace(tmp_path / "w.trace").tokens.collect()
    assert warm.filter(turn=1)["lookups"].sum() == warm.filter(turn=1)["hits"].sum(), (
        "the expert cache stayed warm"
    )


def test_the_budget_may_move_within_a_session(engine, tokens, plain, tmp_path):
    engine.start(cell_of("100%"))
    streamed_logits(engine, tokens)
    held = engine.experts.resident_bytes()
    engine.set_budget("1cycles")
    engine.forget_context()
    assert np.array_equal(streamed_logits(engine, tokens)[0], plain)
    assert engine.experts.resident_bytes() < held / 2
    with pytest.raises(InputError, match="on or off"):
        engine.set_budget("off")
    with TraceWriter(tmp_path / "m.trace", engine.header(cell_of("1cycles")), 8) as writer:
        recorder = Recorder(writer)
        with pytest.raises(RunError, match="one budget"):
            engine.score(tokens, recorder)


def test_a_long_text_is_cut_into_windows_that_are_turns():
    graphs = list(text_graphs(30, window=12, n_ubatch=5))
    assert [(g.turn, g.phase, g.start, g.stop, g.first_position) for g in graphs[:5]] == [
        (0, PREFILL, 0, 5, 0),
        (0, PREFILL, 5, 8, 5),
        (0, DECODE, 8, 9, 8),
        (0, DECODE, 9, 10, 9),
        (0, DECODE, 10, 11, 10),
    ]
    assert [g.turn for g in graphs if g.phase == DECODE] == [0, 0, 0, 1, 1, 1]
    assert (graphs[-1].turn, graphs[-1].start, graphs[-1].stop) == (2, 29, 30)
    assert list(text_graphs(0, 12, 5)) == []


def test_top_k_is_the_models_override(tokens, tmp_path):
    with Engine(top_k=4, n_threads=THREADS) as engine:
        with pytest.raises(InputError, match="opened with top-k 4"):
            engine.start(cell_of("2cycles"))
        trace = record(engine, tokens[:16], cell_of("2cycles", "top_k:k=4"), tmp_path / "k.trace")
    assert trace.width == 4
    assert trace.header.n_expert_used == 8


def test_the_tensor_layout_is_checked(monkeypatch):
    assert "matches" in ggml.check_layout()

    class Other(ggml.Tensor):
        _fields_ = (("more", ggml.ctypes.c_int64),)

    monkeypatch.setattr(ggml, "Tensor", Other)
    with pytest.raises(RunError, match=r"layout differs.*0\.3\.36.*ggml"):
        ggml.check_layout.__wrapped__()


# -- reads ------------------------------------------------------------------------------------------------


def _slices(path, address, sizes):
    offset, found = 100, []
    for i, size in enumerate(sizes):
        found.append(Slice(0, i, "gate", path, offset, size, address + offset, 0))
        offset += size
    return found


@pytest.fixture
def flash(tmp_path):
    path = tmp_path / "experts.bin"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 50_000, dtype=np.uint8).tobytes())
    return path


def _memory():
    region = mmap.mmap(-1, 1 << 17)
    return region, ctypes.addressof(ctypes.c_char.from_buffer(region))


def test_short_reads_are_completed(flash):
    region, address = _memory()

    def short(descriptor, buffers, offset):
        cut = memoryview(buffers[0]).cast("B")[:4096]
        return os.preadv(descriptor, [cut], offset)

    lanes = ReadLanes([flash], lanes=2, direct=False, preadv=short)
    slices = _slices(flash, address, [20_000, 9_000])
    reads = lanes.read(slices)
    lanes.close()
    assert region[100:29_100] == flash.read_bytes()[100:29_100]
    assert [r.window_bytes for r in reads] == [20_000, 9_000]


def test_a_read_error_names_the_offset_and_the_errno(flash):
    _region, address = _memory()

    def broken(descriptor, buffers, offset):
        if offset > 5_000:
            raise OSError(errno.EIO, "Input/output error")
        return os.preadv(descriptor, buffers, offset)

    lanes = ReadLanes([flash], lanes=2, direct=False, preadv=broken)
    with pytest.raises(RunError, match=r"offset 20100 .*errno 5"):
        lanes.read(_slices(flash, address, [20_000, 9_000]))
    lanes.close()


def test_a_file_that_ends_early_is_an_error(flash):
    _region, address = _memory()
    lanes = ReadLanes([flash], lanes=1, direct=False)
    os.truncate(flash, 10_000)
    with pytest.raises(RunError, match="ends before the expert does"):
        lanes.read(_slices(flash, address, [20_000]))
    lanes.close()


def test_direct_reads_that_are_refused_fall_back_aloud(flash):
    def refuse(descriptor, buffers, offset):
        raise OSError(errno.EINVAL, "Invalid argument")

    with pytest.warns(SimlabWarning, match="O_DIRECT is refused here"):
        lanes = ReadLanes([flash], lanes=1, preadv=refuse)
    assert not lanes.direct
    lanes.close()


def test_direct_reads_that_return_other_bytes_fall_back_aloud(flash):
    with pytest.warns(SimlabWarning, match="O_DIRECT returned other bytes"):
        lanes = ReadLanes([flash], lanes=1, preadv=lambda *_: 0)
    assert not lanes.direct
    lanes.close()


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no tmpfs at /dev/shm")
def test_reads_of_a_file_in_memory_are_not_direct():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "experts.bin"
        path.write_bytes(bytes(PAGE))
        (path.parent / "link").symlink_to(path)
        for name in (path, path.parent / "link"):
            with pytest.warns(
                SimlabWarning, match="O_DIRECT reads memory here, where the file system is tmpfs"
            ):
                lanes = ReadLanes([name], lanes=1)
            assert not lanes.direct
            lanes.close()


def test_a_window_ends_with_the_file(flash):
    region, address = _memory()
    # 50,000 bytes end 848 into the 13th page; the slice begins in the 12th.
    last = Slice(0, 0, "gate", flash, 46_000, 4_000, address + 46_000, 0)
    lanes = ReadLanes([flash], lanes=1)
    assert lanes.direct
    (read,) = lanes.read([last])
    lanes.close()
    assert (read.offset, read.window_bytes) == (45_056, 50_000 - 45_056)
    assert region[46_000:50_000] == flash.read_bytes()[46_000:]


def test_a_header_counts_no_bytes_past_the_end_of_the_file(engine):
    gate, up, down = engine.experts.slices[7, 63]
    end = EMBEDDED_MODEL.stat().st_size
    assert down.offset + down.size == end
    assert end % PAGE
    whole_pages = sum(last - first for first, last in (page_window(s.offset, s.size) for s in (gate, up)))
    assert engine.experts.window_bytes(7, direct=True)[63] == whole_pages + end - down.offset // PAGE * PAGE


def test_page_windows():
    assert page_window(0, 4096) == (0, 4096)
    assert page_window(4095, 2) == (0, 8192)
    assert page_window(8192, 1) == (8192, 12288)


def test_a_closed_engine_says_so():
    engine = Engine(n_threads=THREADS)
    engine.start(cell_of("2cycles"))
    engine.close()
    with pytest.raises(RunError, match="closed"):
        engine.tokenize(b"x")
    with pytest.raises(RunError):
        engine.score([1, 2, 3])


def test_a_failed_read_ends_the_session(engine, tokens, monkeypatch):
    engine.start(cell_of("1.2cycles"))

    def broken(*_):
        raise RunError("flash is gone")

    with monkeypatch.context() as patched:
        patched.setattr(ReadLanes, "read", broken)
        with pytest.raises(RunError, match="flash is gone"):
            engine.score(tokens)
    with pytest.raises(RunError, match="no session is open"):
        engine.score(tokens)


def test_a_read_error_leaves_what_was_recorded_readable(engine, tokens, monkeypatch, tmp_path):
    real, reads = ReadLanes.read, []

    def wears_out(lanes, slices):
        reads.append(len(slices))
        if len(reads) > 100:
            raise RunError(
                "experts.gguf: reading 4096 bytes at offset 8192 failed: Input/output error (errno 5)"
            )
        return real(lanes, slices)

    monkeypatch.setattr(ReadLanes, "read", wears_out)
    cell = cell_of("1.2cycles", "substitute:L=0.15")
    with pytest.raises(RunError, match=r"offset 8192 .*errno 5"):
        engine.record_text(tokens, cell, tmp_path / "broken.trace")
    with pytest.warns(SimlabWarning, match="did not finish"):
        trace = open_trace(tmp_path / "broken.trace")
    recorded = trace.tokens.collect()
    assert 0 < recorded.height < N_TOKENS - 8
    assert trace.routing.filter(phase=DECODE).collect().height == 8 * recorded.filter(phase=DECODE).height
    assert replay(trace, cell).all.hits == recorded["hits"].sum()


@pytest.mark.parametrize(
    ("available_mib", "experts_mib", "expected_mib"),
    [
        (20_000, 12, 12),  # everything fits
        (20_000, 16_000, 20_000 - 100 - 1536),  # what memory leaves, less dense bytes and the reserve
        (2_000, 16_000, 1500),  # never under the floor
        (2_000, 700, 700),  # nor over all there is
    ],
)
def test_the_automatic_budget_by_hand(monkeypatch, available_mib, experts_mib, expected_mib):
    mib = 1 << 20
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: available_mib * mib)
    header = TraceHeader("m", "a", 1, 10, 2, None, None, None, {0: experts_mib * mib // 10})
    expected = min(expected_mib * mib, header.expert_bytes)
    assert machine.auto_budget(header, 100 * mib).total_bytes == expected


def test_an_exception_in_the_asking_path_ends_the_decode(engine, tokens, monkeypatch):
    engine.start(cell_of("1.2cycles"))
    calls = []

    def odd(address, *size):
        calls.append(address)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return ctypes.string_at(address, *size)

    monkeypatch.setattr(hook, "string_at", odd)
    with pytest.raises(KeyboardInterrupt):
        engine.score(tokens)


def test_lanes_out_of_range_are_refused():
    with pytest.raises(InputError, match="between 1 and 8"):
        Engine(lanes=9)


def test_a_model_is_found_by_its_kind(tmp_path):
    model = read_gguf(EMBEDDED_MODEL)
    assert (model.arch, model.n_layer, model.n_expert, model.n_expert_used) == ("qwen3moe", 8, 64, 8)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(EMBEDDED_MODEL.read_bytes()[:1_000_000])
    with pytest.raises(InputError, match="cut short"):
        read_gguf(cut)


def test_the_header_not_the_name_says_what_a_shard_is(tmp_path):
    whole = tmp_path / "m-00002-of-00003.gguf"
    shutil.copy(EMBEDDED_MODEL, whole)
    assert read_gguf(whole).files == (whole,)
    first = make_model(tmp_path, "sharded")
    second, third = (tmp_path / f"sharded-0000{i}-of-00003.gguf" for i in (2, 3))
    assert read_gguf(first).files == (first, second, third)
    with pytest.raises(InputError, match=r"give the first shard, sharded-00001-of-00003.gguf"):
        read_gguf(second)
    renamed = tmp_path / "all.gguf"
    shutil.copy(first, renamed)
    with pytest.raises(
        InputError, match=r"shard 1 of 3 by its split.no; its name must end in -00001-of-00003.gguf"
    ):
        read_gguf(renamed)
    shutil.copy(third, second)
    with pytest.raises(
        InputError, match=r"sharded-00002-of-00003.gguf: its split.no is 2 and .* not 1 and 3"
    ):
        read_gguf(first)
    second.unlink()
    with pytest.raises(
        InputError, match=r"00002-of-00003.gguf: this shard of sharded-00001-of-00003.gguf is missing"
    ):
        read_gguf(first)
