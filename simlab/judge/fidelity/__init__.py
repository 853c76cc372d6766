"""How far replays are off from live runs, and replays on several recordings."""
