"""What can go wrong with data, one class a cause. A message is one line: the cause, the cure."""


class DataError(ValueError):
    """Base of every error this subpackage raises about the user's data or options."""


class SourceError(DataError):
    """The source of a corpus is missing, unreadable, corrupt or without a single document."""


class TokenizerError(DataError):
    """A tokenizer is missing or unusable, or is not the one a dataset was prepared with."""


class OutputError(DataError):
    """A dataset cannot be written where it was asked for."""


class DatasetError(DataError):
    """A prepared dataset is missing, of another format version, or damaged."""


class CorpusTooSmallError(DataError):
    """A split holds fewer rows than one batch takes."""


class VocabularyError(DataError):
    """The tokenizer has more tokens than the model has embedding rows."""
