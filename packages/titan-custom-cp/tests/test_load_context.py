import contextlib

import pytest

from titan_custom_cp import (
    CustomContextParallelContext,
    UlyssesContextParallelContext,
    load_context,
)


class Mine(CustomContextParallelContext):
    pass


class Manager(contextlib.nullcontext):
    pass


def test_by_name():
    name = "titan_custom_cp.UlyssesContextParallelContext"
    assert load_context(name) is UlyssesContextParallelContext
    assert load_context(f"{__name__}.Mine") is Mine


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Mine", "path: got 'Mine'; expected 'module.Class'"),
        ("", "path: got ''; expected 'module.Class'"),
        (".mine.Mine", "path: got '.mine.Mine'; expected 'module.Class'"),
        ("nowhere.at_all.Mine", "there is no module 'nowhere'"),
        ("titan_custom_cp.nowhere.Mine", "there is no module 'titan_custom_cp.nowhere'"),
        (f"{__name__}.Absent", f"{__name__} has no 'Absent'"),
        (f"{__name__}.test_by_name", "a function; expected a class"),
        ("builtins.int", "which is no context manager, and not a subclass of"),
        (f"{__name__}.Manager", "which is a context manager, but not a subclass of"),
    ],
)
def test_what_is_no_context(path, message):
    with pytest.raises(ValueError, match=message):
        load_context(path)


def test_a_module_that_fails_by_itself_says_so(tmp_path, monkeypatch):
    (tmp_path / "broken_context.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_context("broken_context.Mine")
