"""Trains the embedded model: corpus, network, optimizer, export, figures. Needs the `train` extra."""
