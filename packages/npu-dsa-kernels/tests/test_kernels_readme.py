import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    out_shape, _ = capsys.readouterr().out.split(") ", 1)
    assert "torch.Size([1, 512, 8, 64]" in out_shape
