"""What Windows lacks or refuses is hidden; then all of flops is imported, and a model is trained.

`tests/faults/test_other_systems.py` runs this in a process of its own, in a locale without UTF-8.
It is a simulation: it knows of the differences that are named here, and of no others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pkgutil
import shutil
import signal
import sys
import warnings
from fcntl import F_GETFL, fcntl
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

# What other packages do when they are imported here is their business.
OTHERS = (
    "transformers.models.vit.modeling_vit",
    "sklearn.datasets",
    "matplotlib.figure",
    "PIL.Image",
)
OTHERS += ("matplotlib.backends.backend_agg", "datasets", "peft", "fastapi", "uvicorn", "httpx")

MODULES = ("fcntl", "resource", "uvloop", "termios", "pty")
OF_OS = ("sysconf", "sysconf_names", "killpg", "getpgid", "setsid", "fchmod", "getuid", "geteuid")
OF_OS += ("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC", "O_SYNC", "sched_getaffinity", "getloadavg")
OF_SIGNAL = ("SIGKILL", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGQUIT", "setitimer", "alarm")
RESERVED = set('<>:"|?*')
fsync, renamed = os.fsync, os.rename


def hide() -> None:
    """Take away what Windows does not have, and refuse what it refuses."""
    for name in OTHERS:
        import_module(name)
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in ((os, OF_OS), (signal, OF_SIGNAL)):
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # as there
    os.fsync, os.rename = sync_what_was_written, rename  # type: ignore[assignment]
    os.environ["USERNAME"] = "someone"  # else getpass asks for the uid
    sys.addaudithook(refuse)
    warnings.filterwarnings("error", category=EncodingWarning, module=r"flops\b")


def sync_what_was_written(file: int) -> None:
    """As the original, for files that are open for writing."""
    if fcntl(file, F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    fsync(file)


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """No folders that are opened or replaced, and no reserved characters in names."""
    if event == "open" and isinstance(arguments[0], str | bytes):
        path, flags = os.fsdecode(arguments[0]), arguments[2]
        if path == "/proc/meminfo":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
            check(path)
    elif event == "os.mkdir":
        check(os.fsdecode(arguments[0]))  # type: ignore[arg-type]
    elif event == "os.rename":
        target = os.fsdecode(arguments[1])  # type: ignore[arg-type]
        check(target)
        if os.path.isdir(target):
            raise PermissionError(errno.EACCES, "Permission denied", target)


def rename(source: str | Path, target: str | Path) -> None:
    """As the original, where nothing is in the way; replace() is another function."""
    if os.path.exists(target):
        raise FileExistsError(errno.EEXIST, "File exists", str(target))
    renamed(source, target)


def check(path: str) -> None:
    """Refuse names that Windows has no files of."""
    if RESERVED & set(path) or any(part.endswith((".", " ")) for part in Path(path).parts):
        raise OSError(errno.EINVAL, "Invalid argument", path)


def import_all() -> int:
    """Every module of the package; returns how many."""
    import flops

    names = [module.name for module in pkgutil.walk_packages(flops.__path__, "flops.")]
    for name in names:
        if not name.endswith("__main__"):
            import_module(name)
    return len(names)


def estimate() -> None:
    """An engine fills the gradients."""
    from flops import ForwardGradient

    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    fg = ForwardGradient(model, lambda y, t: (y - t).square().mean(1))
    fg.estimate(torch.randn(6, 4), torch.randn(6, 2))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def train(folder: Path) -> None:
    """A run that is stopped is continued; its checkpoints replace each other."""
    from flops.tasks.classification.config import FinetuneConfig
    from flops.training.loop import train
    from flops.training.run_directory import new_folder

    config = FinetuneConfig(limit=48, batch=16, queries=2, epochs=2, checkpoint_steps=1)
    output = new_folder(FinetuneConfig(data="hub:name", seed=1), folder)
    config = type(config)(**{**vars(config), "output": str(output)})
    done = train(config)
    assert done.evaluations
    again = train(config, resume=True)
    assert again.evaluations[-1].accuracy == done.evaluations[-1].accuracy


def keep_cells(folder: Path) -> None:
    """Results of a study are written, replaced and read."""
    from flops.experiments.cells import Cell
    from flops.experiments.warm_starts import WarmStart

    cell = Cell("part", len, WarmStart(model="random:vit-base", data='a/b:"c"?', steps=0))
    for found in (1, 2):
        cell.save(folder, {"found": found, "name": "größer"})
        assert cell.load(folder) == {"found": found, "name": "größer"}


def main() -> None:
    """All of it, in the folder that is given."""
    folder = Path(sys.argv[1])
    hide()
    for path in ("a:b", "trailing."):
        with contextlib.suppress(OSError):
            (folder / path).write_text("", encoding="utf-8")
            raise AssertionError(f"{path} was not refused: the simulation is broken")
    print(import_all(), "modules")
    estimate()
    keep_cells(folder)
    train(folder)
    print("done")


if __name__ == "__main__":
    main()
