"""On a card: the checks of the GPU backend, and its measurements."""
