"""What all tests share: nothing that imports torch, so that the pure parts are tested without it."""

import hypothesis

# Start from hypothesis' own choice (its "ci" profile where CI is set: the same examples in each run). No time limit per
# example: on a small, busy machine a first call that compiles or imports would fail by chance.
hypothesis.settings.register_profile("k3comm", parent=hypothesis.settings.default, deadline=None)
hypothesis.settings.load_profile("k3comm")
