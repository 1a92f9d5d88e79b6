"""`fit` beside other programs: `python benchmarks/scripts/peers OUTPUT --root=CIFAR10 --timm=DIR --kuangliu=DIR`.

All train torchvision's ResNet18 on CIFAR-10 in batches of 128 on the CPU. DIR are clones of pytorch-image-models and
pytorch-cifar. The data are in the binary edition, whose place the programs take for torchvision's.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

from lit_cifar.tools.terminal import about

HERE = Path(__file__).parent
WARM_UP = 8  # steps that are not timed
NETWORK = ["--model.arch=resnet18", "--model.stem=imagenet", "--trainer.accelerator=cpu"]


class Peers:
    """The command of each program, with what resumes it, in a folder of its own."""

    def __init__(self, root: Path, timm: Path, kuangliu: Path) -> None:
        self.root, self.timm, self.kuangliu = root.resolve(), timm.resolve(), kuangliu.resolve()

    def fit(self, folder: Path, *, epochs: int, resumes: bool, ranks: int = 1, num_images: int = 0) -> list[str]:
        mode = ["--trainer.strategy=ddp", f"--trainer.devices={ranks}"] if ranks > 1 else []
        size = [f"--data.num_train={2 * num_images}", f"--data.val_size={num_images}"] if num_images else []
        run = [f"--run_dir={folder / 'run'}", "--resume=auto", f"--trainer.max_epochs={epochs}", *mode, *size]
        return ["-m", "lit_cifar", "fit", *NETWORK, f"--data.root={self.root}", *run]

    def script(self, name: str, folder: Path, *, epochs: int, resumes: bool, **_: int) -> list[str]:
        made = {"plain": "last.pt", "stock": "lightning_logs/version_0/checkpoints/*.ckpt", "with_accelerate": "state"}
        checkpoint = [str(next(folder.glob(made[name])))] if resumes else []
        return [str(HERE / f"{name}.py"), str(self.root), str(epochs), *checkpoint]

    def timm_script(self, folder: Path, *, epochs: int, resumes: bool, **_: int) -> list[str]:
        text = (self.timm / "train.py").read_text().replace("device_ids=[device]", "device_ids=None")  # of a CPU
        (folder / "train.py").write_text(text)
        if not (folder / "timm").exists():
            (folder / "timm").symlink_to(self.timm / "timm")
        words = [str(folder / "train.py"), "--data-dir", str(self.root), "--dataset", "torch/cifar10"]
        words += ["--model=resnet18", "--num-classes=10", "--img-size=32", "--batch-size=128", "--opt=sgd", "--lr=0.1"]
        words += ["--workers=2", "--device=cpu", "--no-prefetcher", f"--epochs={epochs}", "--output", str(folder)]
        words += ["--experiment=run", "--warmup-epochs=0", "--val-split=test"]
        return [*words, "--resume", str(folder / "run" / "last.pth.tar")] if resumes else words

    def kuangliu_script(self, folder: Path, *, epochs: int, resumes: bool, **_: int) -> list[str]:
        text = (self.kuangliu / "main.py").read_text()
        text = text.replace("net = SimpleDLA()", "net = torchvision.models.resnet18(num_classes=10)")
        (folder / "main.py").write_text(text.replace("root='./data'", f"root={str(self.root)!r}"))
        for name in ("models", "utils.py"):
            if not (folder / name).exists():
                (folder / name).symlink_to(self.kuangliu / name)
        tool = folder / "stty"  # the script asks for the size of the terminal
        tool.write_text("#!/bin/sh\necho 24 80\n")
        tool.chmod(0o755)
        return [str(folder / "main.py"), *(["--resume"] if resumes else [])]

    def all(self, only: list[str] | None = None) -> dict[str, Callable[..., list[str]]]:
        scripts = {name: partial(self.script, name) for name in ("plain", "stock", "with_accelerate")}
        found = {"fit": self.fit, **scripts, "timm": self.timm_script, "kuangliu": self.kuangliu_script}
        return {name: command for name, command in found.items() if not only or name in only}


def run(words: list[str], folder: Path, *, steps: int, num_images: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Run a program, and return what it did: seconds to each step, images, and the peak of its processes' memory."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    given = [str(HERE / "stopwatch.py"), str(folder / "watched.json"), str(steps), str(num_images), *words]
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    with (folder / "said.txt").open("w") as said:
        process = subprocess.Popen([*launcher, *given], cwd=folder, env=environment, stdout=said, stderr=said)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, _memory(process.pid))
            time.sleep(0.5)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("watched.?.json"))]
    if not found or (process.returncode and not steps):
        raise RuntimeError((folder / "said.txt").read_text()[-3000:])
    return {"memory_gb": peak / 1e9, "ranks": found}


def _memory(pid: int) -> float:
    """Memory of a process and of those that it has started, in bytes; what they share is counted once."""
    total = 0.0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            total += process.memory_full_info().pss
    except psutil.Error:
        pass
    return total


def timed(words: list[str], folder: Path, steps: int) -> dict[str, float]:
    result = run(words, folder, steps=steps)
    times = result["ranks"][0]["steps"]
    speed = 128 * (len(times) - WARM_UP) / (times[-1] - times[WARM_UP - 1])
    return {"images_per_s": speed, "first_step_s": times[0], "memory_gb": result["memory_gb"]}


def epoch_on_two(words: list[str], folder: Path, num_images: int) -> dict[str, int]:
    """Images that two processes together train on and evaluate in an epoch, of `num_images` each."""
    found = run(words, folder, steps=0, num_images=num_images, ranks=2)["ranks"]
    return {name: sum(rank[name] for rank in found) for name in ("trained", "evaluated")}


def resumed(command: Callable[..., list[str]], folder: Path, num_images: int, steps_each: int) -> dict[str, float]:
    """Largest difference of a weight after two epochs, stopped in the second and resumed, from not stopped."""
    whole, ends = [2 * steps_each], []
    for name, parts in {"whole": whole, "again": whole, "parts": [steps_each + 4, steps_each]}.items():
        (below := folder / name).mkdir()
        for turn, steps in enumerate(parts):
            words = command(below, epochs=2, resumes=turn > 0, num_images=num_images)
            run(words, below, steps=steps, num_images=num_images)
        ends.append(torch.load(below / "watched.0.pt", weights_only=True))
    first, again, resumed = ends
    return {"repeated": float((again - first).abs().max()), "resumed": float((resumed - first).abs().max())}


def lines(peers: Peers) -> dict[str, int]:
    """Lines with code that the user writes or copies; plain.py's transforms are imported by the next two."""
    files = {name: HERE / f"{name}.py" for name in ("plain", "stock", "with_accelerate")}
    files["kuangliu"] = peers.kuangliu / "main.py"
    return {name: sum(bool(line.strip()) for line in file.read_text().splitlines()) for name, file in files.items()}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time `fit` beside other programs.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder of CIFAR-10, its binary edition")
    parser.add_argument("--timm", type=Path, required=True, help="a clone of huggingface/pytorch-image-models")
    parser.add_argument("--kuangliu", type=Path, required=True, help="a clone of kuangliu/pytorch-cifar")
    parser.add_argument("--only", nargs="+", help="some of the programs, such as timm; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--images", type=int, default=1001, help="for what is counted and resumed")
    return parser


def main() -> None:
    args = parser().parse_args()
    peers = Peers(args.root, args.timm, args.kuangliu)
    record = about() | {"lines": lines(peers), "steps": args.steps, "images": args.images}
    rounds: list[dict[str, Any]] = []
    for _ in range(args.rounds):
        row = {}
        for name, command in peers.all(args.only).items():
            with TemporaryDirectory() as folder:
                row[name] = timed(command(Path(folder), epochs=1, resumes=False), Path(folder), args.steps)
            print(name, row[name], flush=True)
        rounds.append(row)
        of_all = {name: {kind: [row[name][kind] for row in rounds] for kind in row[name]} for name in row}
        args.output.write_text(json.dumps(record | {"rounds": of_all}, indent=1) + "\n")
    record |= {"rounds": of_all, "resume": {}, "on_two": {}}
    for name, command in peers.all(args.only).items():
        with TemporaryDirectory() as folder:
            steps_each = args.images // 128 + (name != "timm")  # which leaves out the last batch
            record["resume"][name] = resumed(command, Path(folder), args.images, steps_each)
        if name not in ("plain", "kuangliu"):  # of one process each
            with TemporaryDirectory() as folder:
                words = command(Path(folder), epochs=1, resumes=False, ranks=2, num_images=args.images)
                record["on_two"][name] = epoch_on_two(words, Path(folder), args.images)
        print(name, record["resume"][name], record["on_two"].get(name), flush=True)
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
