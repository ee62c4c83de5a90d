"""Files that are cut short, have flipped bits, or a block of zeros."""

import re
import shutil
from pathlib import Path
from random import Random

from benchmarks.fault_kinds.judging import WEIGHTS, BadError, checkpoint_step, rows
from benchmarks.fault_kinds.rounds import OR_A_LINE, Round
from benchmarks.fault_kinds.stops import SAVED, same_output

BLOCK = 512
KINDS = ("cut", "flipped", "flipped", "zeros", "empty")
# What a safetensors file, which has no checksum, shows by itself.
STRUCTURAL = ("cut", "empty")
# The end of an error's line, and what it tells to do with the damaged file.
RESTORE = re.compile(r"(copy|download|export|write) it again|copy them again|name a LoRA")
DELETE = re.compile(r"delete it|remove the file|start it again")


def damage(path: Path, random: Random, kinds: tuple[str, ...] = KINDS) -> str:
    """Change a file in one of these ways; return the change in words."""
    content = bytearray(path.read_bytes())
    kind = random.choice(kinds) if content else "filled"
    place = random.randrange(max(1, len(content)))
    if kind == "cut":
        del content[place:]
    elif kind == "flipped":
        content[place] ^= 1 << random.randrange(8)
    elif kind == "zeros":
        content[place : place + BLOCK] = bytes(len(content[place : place + BLOCK]))
    else:
        content[:] = b"" if kind == "empty" else b"?"
    path.write_bytes(content)
    return f"{path.name} {kind} at {place}"


class Damaged:
    """A damaged file, with its content before."""

    def __init__(self, round: Round, path: Path, kinds: tuple[str, ...] = KINDS) -> None:
        self.round = round
        self.path = path
        self.before = path.read_bytes()
        round.words.append(damage(path, round.random, kinds))

    def heed(self) -> None:
        """Follow the error line; raise a BadError if it does not name the file or a fix."""
        line = self.round.lines[-1]
        if self.path.name not in line:
            raise BadError(f"{self.path.name} is not named: {line}")
        if RESTORE.search(line):
            self.path.write_bytes(self.before)
        elif DELETE.search(line):
            self.path.unlink()
        elif "start again" not in line:
            raise BadError(f"it does not say what to do: {line}")


def damaged_cache(round: Round) -> None:
    """damaged files of a finished cache"""
    folder = round.take_cache()
    lists = [folder / "manifest.json", folder / "files-0.jsonl", folder.parent / "models.jsonl"]
    choices = [*lists, *sorted(folder.glob("latents-*"))[:6]]
    damaged = [Damaged(round, path) for path in round.random.sample(choices, round.random.randint(1, 2))]
    if round.random.random() < 0.5:
        round.run("predict", *round.shop.build())
    text = round.run("train", *round.shop.train(), allowed=OR_A_LINE)
    if text and round.lines:
        for one in damaged:
            if one.path.name in round.lines[-1]:
                one.heed()
        round.run("train", *round.shop.train())
    round.same_run("train")
    round.same_cache()


def damaged_copy(round: Round) -> None:
    """a damaged file of data.shards=FOLDER"""
    folder = round.take_cache()
    choices = [folder / "manifest.json", *sorted(folder.glob("latents-*"))[:4]]
    damaged = Damaged(round, round.random.choice(choices))
    command = round.shop.on_shards(folder)
    round.run("train", *command, allowed=OR_A_LINE)
    if round.lines:
        damaged.heed()
        round.run("train", *command)
    round.same_run("copy")


def damaged_build(round: Round) -> None:
    """damaged files of a killed build"""
    round.kill(round.moment("build", timed=False), "predict", *round.shop.build())
    left = sorted(path for path in round.folder.glob("cache/*/**/*") if path.is_file() and path.name != ".used")
    chosen = round.random.sample(left, min(len(left), round.random.randint(1, 3)))
    damaged = [Damaged(round, path) for path in chosen]
    for _ in damaged:
        round.run("predict", *round.shop.build(), allowed=OR_A_LINE)
        if round.commands[-1].status == 0:
            break
        for one in damaged:
            if one.path.name in round.lines[-1]:
                one.heed()
    if round.lines or not damaged:
        round.run("predict", *round.shop.build())
    round.same_cache()


def damaged_checkpoint(round: Round) -> None:
    """damaged checkpoints of a killed run"""
    round.take_cache()
    run = round.folder / "run"
    moment = round.moment("train", SAVED, timed=False)
    behind = round.shop.reference("train").count(SAVED) * 3 // 4
    moment = moment._replace(change=max(behind, moment.change or 0))
    round.kill(moment, "train", *round.shop.train())
    files = sorted((run / "checkpoints").glob("*.ckpt"))  # last.ckpt comes first
    if len(files) < 2:
        raise BadError(f"{len(files)} checkpoints")
    all_of_them = round.random.random() < 0.2
    damaged = [Damaged(round, path) for path in (files if all_of_them else files[:1])]
    # PyTorch alone reads what a checksum of the file shows to be damaged.
    good = [path for path in files if path not in [one.path for one in damaged if one.path.read_bytes() != one.before]]
    step = max((checkpoint_step(path) or 0 for path in good), default=0)
    saved = [row for row in rows(run / "metrics.csv") if int(row["step"]) <= step]
    weights = {path: path.read_bytes() for path in run.glob("lora/*/*.safetensors")}
    round.run("train", *round.shop.train(), allowed=OR_A_LINE)
    if round.lines and good:
        raise BadError("the checkpoint before was not taken")
    if round.lines:
        if not any(one.path.name in round.lines[-1] for one in damaged):
            raise BadError(f"no checkpoint is named: {round.lines[-1]}")
        if weights != {path: path.read_bytes() for path in run.glob("lora/*/*.safetensors")}:
            raise BadError("its weights were changed")
        shutil.rmtree(run)
        round.run("train", *round.shop.train())
    else:
        round.kept(saved)
    round.same_run("train")


def damaged_lora(round: Round) -> None:
    """a LoRA file, cut short or empty"""
    shutil.copytree(round.shop.reference("train").folder / "run", round.folder / "run")
    path = round.folder / "run" / "lora" / "last" / WEIGHTS
    damaged = Damaged(round, path, STRUCTURAL)
    kind = round.random.choice(["edit", "export"])
    make = round.shop.edit if kind == "edit" else round.shop.export
    round.run("predict", *make(round.folder / "run"), allowed=OR_A_LINE)
    if round.lines:
        damaged.heed()
        round.run("predict", *make(round.folder / "run"))
    same_output(round, kind, "*.png" if kind == "edit" else "*.safetensors")


def damaged_end(round: Round) -> None:
    """a damaged finished.json or config.yaml"""
    round.take_cache()
    if round.random.random() < 0.5:
        round.kill(round.moment("train", r"^run/", timed=False), "train", *round.shop.train())
    else:
        round.run("train", *round.shop.train())
    names = ["finished.json", "finished.json", "config.yaml"]
    found = [path for path in (round.folder / "run" / name for name in names) if path.exists()]
    damaged = Damaged(round, round.random.choice(found)) if found else None
    round.run("train", *round.shop.train(), allowed=OR_A_LINE)
    if damaged is not None and round.lines:
        if "cannot resume with a changed setting" in round.lines[-1]:
            damaged.path.write_bytes(damaged.before)
        else:
            damaged.heed()
        round.run("train", *round.shop.train())
    round.same_run("train")
