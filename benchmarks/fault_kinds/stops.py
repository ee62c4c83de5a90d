"""kill -9 and other signals, at any moment."""

import re
import signal
import time
from functools import partial
from pathlib import Path

from benchmarks.fault_kinds import hooks
from benchmarks.fault_kinds.commands import Command
from benchmarks.fault_kinds.judging import BadError, same_file, same_picture
from benchmarks.fault_kinds.rounds import Round
from benchmarks.fault_kinds.workshop import PAIRS

# What a merge writes, and what a saving does.
MERGED = r"^cache/.*(manifest|files|latents-\d+-\d+\.jsonl)"
SAVED = r"^run/(lora|checkpoints)/"
# All that a run writes in its first saving is among so many changes.
FIRST_SAVING = 12


def kill_build(round: Round, pattern: str | None = None) -> None:
    """kill -9 while a cache is built"""
    counted = round.folder / "encoded"
    also = [partial(hooks.count_encodings, str(counted))]
    kills = round.random.randint(1, 3)
    for _ in range(kills):
        moment = round.moment("build") if pattern is None else round.moment("build", pattern, timed=False)
        round.kill(moment, "predict", *round.shop.build(), also=also)
    round.run("predict", *round.shop.build(), also=also)
    round.same_cache()
    if counted.stat().st_size > PAIRS + kills:  # the sample in hand may be lost
        raise BadError(f"{counted.stat().st_size} samples were encoded, of {PAIRS}, with {kills} kills")


def kill_merge(round: Round) -> None:
    """kill -9 while an index is written"""
    kill_build(round, MERGED)


def kill_train(round: Round) -> None:
    """kill -9 while a run trains or saves"""
    kind = "shown" if round.random.random() < 0.25 else "train"
    if kind == "train":
        round.take_cache()
    command = round.shop.train(kind == "shown")
    saved: list[dict[str, str]] = []
    for _ in range(round.random.randint(1, 3)):
        round.kill(round.moment(kind), "train", *command)
        round.kept(saved)
        saved = round.saved()
    round.run("train", *command)
    round.same_run(kind)
    round.kept(saved)


def kill_first_saving(round: Round) -> None:
    """kill -9 during a run's first checkpoint"""
    round.take_cache()
    moment = round.moment("train", SAVED, timed=False)
    first = moment._replace(change=round.random.randint(1, FIRST_SAVING))
    round.kill(first, "train", *round.shop.train())
    round.run("train", *round.shop.train())
    round.same_run("train")


def kill_export(round: Round) -> None:
    """kill -9 while a LoRA is exported"""
    reference = round.shop.reference("train").folder / "run"
    command = round.shop.export(reference)
    round.kill(round.moment("export"), "predict", *command)
    round.run("predict", *command)
    same_output(round, "export", "*.safetensors")


def kill_one_of_two(round: Round) -> None:
    """kill -9 of one of two builds"""
    moment = round.moment("build")
    names = [round.shop.build() for _ in range(2)]
    other = None
    if round.random.random() < 0.5:
        other = round.start("predict", *names[1])
        time.sleep(round.random.uniform(0, 0.5))
    killed = round.strike(moment, signal.SIGKILL, "predict", *names[0])
    other = other or round.start("predict", *names[1])
    round.ended(killed, (0, -signal.SIGKILL))
    round.ended(other)
    text = round.run("predict", *names[0])
    if re.search(r"encoded \d+ samples", text):
        raise BadError("the killed one's command encodes again what is there")
    round.same_cache()


def stop(round: Round) -> None:
    """SIGTERM, SIGINT or SIGUSR1 to any command"""
    kind = round.random.choice(["train", "train", "shown", "build", "edit"])
    number = round.random.choice([signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
    if kind in ("train", "edit"):
        round.take_cache()
    trained = round.shop.reference("train").folder / "run" if kind == "edit" else Path()
    commands = {"build": round.shop.build(), "edit": round.shop.edit(trained)}
    script = "predict" if kind in commands else "train"
    command = commands.get(kind) or round.shop.train(kind == "shown")
    process = round.strike(round.moment(kind), number, script, *command)
    if round.random.random() < 0.4:
        _again(round, process, number)
    # A process that does not listen yet, or not any more, ends as any other.
    round.ended(process, (0, 128 + number, -number))
    saved = round.saved() if script == "train" and (round.folder / "run").exists() else []
    round.run(script, *command, *(["output_dir=out2"] if kind == "edit" else []))
    if kind == "build":
        round.same_cache()
    elif kind == "edit":
        same_output(round, "edit", "*.png", "out2")
    else:
        round.same_run(kind)
        round.kept(saved)


def _again(round: Round, process: Command, number: signal.Signals) -> None:
    """Send the signal again, soon after the first or later."""
    seconds = round.random.choice([round.random.uniform(0, 0.2), round.random.uniform(1, 2)])
    round.words.append(f"again {seconds:.2f} s later")
    time.sleep(seconds)
    process.send(number)


def same_output(round: Round, kind: str, pattern: str, name: str = "out") -> None:
    """Raise a BadError unless the output files equal those of the reference."""
    reference = round.shop.reference(kind).folder / "out"
    files = sorted(path.name for path in reference.glob(pattern))
    same = same_picture if pattern == "*.png" else same_file
    wrong = [file for file in files if not same(reference / file, round.folder / name / file)]
    if wrong or not files:
        raise BadError(f"{wrong or pattern} is not the same")
