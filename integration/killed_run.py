"""One rank of a training run that gets SIGKILL when it is about to write a given file.

    torchrun ... killed_run.py FILE [torchtitan options]

FILE is the end of a path, such as ``.incomplete-4-*/manifest.json``; the first rank to open a
matching file for writing is killed. What it had written but not flushed is lost, as in any kill.
"""

import fnmatch
import os
import signal
import sys

from titan_npu_train import train


def main() -> int:
    pattern, *options = sys.argv[1:]

    def kill(event: str, arguments: tuple) -> None:
        if event != "open" or "w" not in (arguments[1] or ""):
            return
        if fnmatch.fnmatch(str(arguments[0]), f"*/{pattern}"):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    return train.main(options)


if __name__ == "__main__":
    os._exit(main())
