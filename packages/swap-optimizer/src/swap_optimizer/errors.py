"""What can go wrong, and whether the step happened."""


class SwapFileError(RuntimeError):
    """The swap file is in use, is not one of ours, has vanished, was cut short, or is full."""


class StepError(RuntimeError):
    """A step that went wrong. The message says whether it happened.

    Attributes:
        happened: True: wholly, and no state is lost. False: not at all. None: in part.
    """

    def __init__(self, message: str, happened: bool | None) -> None:
        super().__init__(message)
        self.happened = happened
