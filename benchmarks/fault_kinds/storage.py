"""An object store that is slow, fails, lies, or is away for a while: shards are read from it, caches are built in it,
runs are copied to it.
"""

import shutil
import threading
from collections.abc import Callable

from benchmarks.fault_kinds.judging import BadError
from benchmarks.fault_kinds.proxy import FAILS, LIES, Weather, proxy
from benchmarks.fault_kinds.rounds import OR_A_LINE, Round
from benchmarks.fault_kinds.store import BUCKET, environment, objects, store
from benchmarks.fault_kinds.workshop import RUN_FILES


def bad_weather(round: Round, kinds: tuple[str, ...]) -> Weather:
    """Draw one or two of these faults, and the share of requests that have them: a tenth to a half."""
    chosen = tuple(round.random.sample(kinds, round.random.randint(1, 2)))
    share = round.random.uniform(0.1, 0.5)
    round.words.append(f"{' and '.join(chosen)} in {share:.2f} of requests")
    return Weather(store(), round.random, share, chosen)


def streamed(round: Round) -> None:
    """Shards are read from a store that is slow, fails or lies. A run that ends in a line starts again."""
    weather = bad_weather(round, FAILS + LIES)
    with proxy(weather) as address:
        round.environment = environment(address)
        round.run("train", *round.shop.stream(), allowed=OR_A_LINE)
        weather.share = 0.0
        end_anew(round, round.shop.stream())
    round.hit = bool(weather.done)
    round.words.append(str(dict(weather.done)))
    round.same_run("streamed")


def end_anew(round: Round, command: list[str]) -> None:
    """Start the run again from its beginning after an error line."""
    if round.lines:
        if "s3://" not in round.lines[-1]:
            raise BadError(f"the store is not named: {round.lines[-1]}")
        shutil.rmtree(round.folder / "run", ignore_errors=True)
        round.run("train", *command)


def built_in_bucket(round: Round) -> None:
    """A cache is built in a store that is slow, fails or lies, by machines that are killed and may lose their disks."""
    weather = bad_weather(round, FAILS + LIES)
    name = f"{round.name}-{round.seed}"
    build = round.shop.build(f"s3://{BUCKET}/{name}")
    with proxy(weather) as address:
        round.environment = environment(address)
        for _ in range(round.random.randint(1, 2)):
            round.kill(round.moment("build"), "predict", *build)
            if round.random.random() < 0.5:
                round.words.append("its disk is lost")
                shutil.rmtree(round.folder / "cache", ignore_errors=True)
        in_weather(round, weather, "predict", build)
    round.words.append(str(dict(weather.done)))
    there = objects(name)
    for path, content in there.items():
        copy = round.folder / "bucket" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)
    round.same_cache(round.folder / "bucket")


def in_weather(round: Round, weather: Weather, script: str, command: list[str]) -> None:
    """A command, which is done once more in good weather where it ends in a line."""
    lines = len(round.lines)
    round.run(script, *command, allowed=OR_A_LINE)
    if len(round.lines) > lines:
        if "s3://" not in round.lines[-1]:
            raise BadError(f"the store is not named: {round.lines[-1]}")
        share, weather.share = weather.share, 0.0
        round.run(script, *command)
        weather.share = share


def mirrored(round: Round) -> None:
    """A run is copied to a store that is slow, fails or lies, and is killed; its disk may be lost."""
    weather = bad_weather(round, FAILS + LIES)
    round.take_cache()
    name = f"{round.name}-{round.seed}"
    command = round.shop.train(output_dir=f"s3://{BUCKET}/{name}")
    run = round.folder / "outputs" / BUCKET / name
    saved: list[dict[str, str]] = []
    with proxy(weather) as address:
        round.environment = environment(address)
        for _ in range(round.random.randint(1, 3)):
            round.kill(round.moment("train", RUN_FILES), "train", *command)
            round.kept(saved, run)
            if round.random.random() < 0.6:
                round.words.append("its disk is lost")
                shutil.rmtree(round.folder / "outputs", ignore_errors=True)
            saved = round.saved(run)
        in_weather(round, weather, "train", command)
    round.kept(saved, run)
    round.words.append(str(dict(weather.done)))
    same_in_bucket(round, name)


def same_in_bucket(round: Round, name: str) -> None:
    """Raise a BadError unless the run is that of the reference, and the bucket has all of it."""
    folder = round.folder / "outputs" / BUCKET / name
    round.same_run("train", folder)
    there = objects(name)
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    here = {name: path.read_bytes() for name, path in paths.items() if "/." not in f"/{name}"}
    if wrong := sorted(key for key in there.keys() | here.keys() if there.get(key) != here.get(key)):
        raise BadError(f"the bucket has otherwise: {wrong}")


def store_away(round: Round) -> None:
    """The store is away for a while, while shards are read or a run is copied to it, which continues."""
    mirrors = round.random.random() < 0.5
    weather = Weather(store(), round.random, 0.0, FAILS)
    name = f"{round.name}-{round.seed}"
    command = round.shop.train(output_dir=f"s3://{BUCKET}/{name}") if mirrors else round.shop.stream()
    seconds, begins = round.random.uniform(0.3, 4), round.random.uniform(0, 2.5)
    round.words.append(f"{'mirrored' if mirrors else 'streamed'}, away after {begins:.1f} s for {seconds:.1f} s")
    if mirrors:
        round.take_cache()
    with proxy(weather) as address:
        round.environment = environment(address)
        timers = [
            threading.Timer(at, partial_set(weather, away)) for at, away in ((begins, True), (begins + seconds, False))
        ]
        for timer in timers:
            timer.start()
        round.run("train", *command, allowed=OR_A_LINE)
        for timer in timers:
            timer.join()
        if mirrors and round.lines:
            round.run("train", *command)
        elif not mirrors:
            end_anew(round, command)
    round.hit = bool(weather.done)
    if mirrors:
        same_in_bucket(round, name)
    else:
        round.same_run("streamed")


def partial_set(weather: Weather, away: bool) -> Callable[[], None]:
    """Lets the store be away, or come back."""

    def set_away() -> None:
        weather.away = away

    return set_away
