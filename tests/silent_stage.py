"""A stage of a run that shows nothing, for tests without the command line (`tests/conftest.py` puts this folder on the path)."""


class Silent:
    """A stage that shows nothing."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def advance(self, count=1):
        pass
