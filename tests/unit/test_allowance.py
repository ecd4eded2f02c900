"""What streaming may take beside others, on a simulated machine: steps grow by the share, and nobody starves."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import median

import pytest

from kvtier.allowance import OUTLIER, OWED_MAX, PEACE_STEPS, RESERVE, Allowance
from kvtier.cost import Work

DECODE = Work(1, 300)


@dataclass
class Machine:
    """A loop of resident steps and turns of streaming between them; reads in bursts slow both cores down."""

    allowance: Allowance
    random: random.Random
    slowdown: float = 1.6
    """Of a step while rows are read and checked."""
    aftermath: float = 1.0
    """Of a step beside streaming, and of the next, which find the cache full of something else."""
    layer_s: float = 0.004
    layers_a_burst: int = 6
    burst_s: float = 0.015
    reading_s: float = 0.0
    ready: int = 0
    layers: int = 0
    moved: bool = False
    beside: bool = False
    """The last step was beside streaming."""
    steps_s: list[float] = field(default_factory=list)
    """Of each step and the turn after it."""

    def step(self, alone_s: float, work: Work = DECODE) -> None:
        reading = min(self.reading_s, alone_s)
        self.reading_s -= reading
        if reading and self.reading_s <= 0:
            self.ready = self.layers_a_burst
        before, self.beside = self.beside, self.moved or reading > 0
        took_s = (alone_s + reading * (self.slowdown - 1)) * self.random.uniform(0.9, 1.1)
        took_s *= self.aftermath if before or self.beside else 1.0
        self.allowance.note_step(work, took_s, in_peace=not (self.moved or reading))
        turn_s = 0.0
        self.moved = False
        while self.allowance.left:
            if not self.ready:
                self.reading_s = self.reading_s or self.burst_s
                break
            self.ready -= 1
            self.layers += 1
            self.moved = True
            turn_s += self.layer_s
            self.allowance.spend(self.layer_s)
        self.steps_s.append(took_s + turn_s)


@pytest.mark.parametrize("share", [0.1, 0.25, 1.0])
@pytest.mark.parametrize("slowdown", [1.0, 1.3, 2.5])
def test_steps_grow_by_no_more_than_the_share_and_it_is_used(share: float, slowdown: float) -> None:
    machine = Machine(Allowance(share), random.Random(1), slowdown)
    for _ in range(700):
        machine.step(0.02)
    mean_s = sum(machine.steps_s[100:]) / 600
    assert mean_s <= 0.02 * (1 + share) * 1.03
    assert mean_s >= 0.02 * (1 + 0.8 * (1 - RESERVE) * share)
    cost_s = machine.layer_s + machine.burst_s * (slowdown - 1) / machine.layers_a_burst
    assert machine.layers * cost_s >= 0.8 * (1 - RESERVE) * share * 700 * 0.02


@pytest.mark.parametrize("share", [0.1, 0.25, 1.0])
def test_what_the_step_after_streaming_takes_longer_is_charged_and_not_taken_for_its_time_alone(share: float) -> None:
    grown, layers_s = [], 0.0
    for seed in range(20):
        machine = Machine(Allowance(share), random.Random(seed), slowdown=1.2, aftermath=1.13)
        for _ in range(300):
            machine.step(0.02)
        grown.append(sum(machine.steps_s) / 300 / 0.02)
        layers_s += machine.layers * machine.layer_s
    assert median(grown) <= 1 + share
    assert layers_s >= 0.2 * share * 20 * 300 * 0.02


def test_a_machine_that_is_slower_from_now_on_is_not_laid_to_its_charge() -> None:
    machine = Machine(Allowance(0.25), random.Random(2))
    for _ in range(300):
        machine.step(0.02)
    before, machine.layers = machine.layers, 0
    for _ in range(300):
        machine.step(0.06)
    assert machine.layers > before  # there is more time to take a share of
    mean_s = sum(machine.steps_s[400:]) / 200
    assert mean_s <= 0.06 * 1.25 * 1.03


def test_a_machine_that_is_faster_again_is_noticed() -> None:
    machine = Machine(Allowance(0.25), random.Random(3))
    for _ in range(200):
        machine.step(0.03)
    for _ in range(600):
        machine.step(0.02)
    mean_s = sum(machine.steps_s[400:]) / 400
    assert mean_s <= 0.02 * 1.25 * 1.03


def test_a_machine_that_is_faster_from_now_on_is_noticed_within_a_few_dozen_steps() -> None:
    grown = []
    for seed in range(20):
        machine = Machine(Allowance(0.25), random.Random(seed), slowdown=1.2, aftermath=1.1)
        for _ in range(200):
            machine.step(0.03)
        for _ in range(150):
            machine.step(0.02)
        grown.append(sum(machine.steps_s[200:]) / 150 / 0.02)
    assert median(grown) <= 1.4


def test_steps_of_many_shapes_are_each_held_to_their_own_time() -> None:
    machine = Machine(Allowance(0.25), random.Random(4))
    alone_s = 0.0
    for number in range(1000):
        tokens = machine.random.choice([1, 1, 1, 8, 256])
        work = Work(tokens, 300 * tokens)
        step_s = 0.01 + 0.001 * tokens
        if number >= 200:
            alone_s += step_s
        machine.step(step_s, work)
    assert sum(machine.steps_s[200:]) <= alone_s * 1.25 * 1.03
    assert machine.layers * machine.layer_s >= 0.08 * alone_s


def test_nothing_is_streamed_before_it_is_known_what_a_step_takes_alone() -> None:
    allowance = Allowance(0.25)
    allowance.note_step(DECODE, 0.02, in_peace=False)
    assert not allowance.left
    allowance.note_step(DECODE, 0.02, in_peace=True)
    assert not allowance.left
    allowance.note_step(DECODE, 0.02, in_peace=True)
    assert allowance.left
    allowance.spend(0.0055)
    assert not allowance.left


def test_now_and_then_a_step_is_left_in_peace_whatever_is_left() -> None:
    allowance = Allowance(0.25)
    allowance.note_step(DECODE, 0.02, in_peace=True)
    for _ in range(PEACE_STEPS - 1):
        allowance.note_step(DECODE, 0.02, in_peace=False)
        assert allowance.left
    allowance.note_step(DECODE, 0.02, in_peace=False)
    assert not allowance.left
    allowance.note_step(DECODE, 0.02, in_peace=True)  # the cache may still be full of something else
    assert not allowance.left
    allowance.note_step(DECODE, 0.02, in_peace=True)
    assert allowance.left


def test_a_step_that_something_else_held_up_is_paid_off_soon() -> None:
    allowance = Allowance(0.25)
    allowance.note_step(DECODE, 0.02, in_peace=True)
    allowance.note_step(DECODE, 60.0, in_peace=False)
    steps = 0
    while not allowance.left:
        allowance.note_step(DECODE, 0.02, in_peace=True)
        steps += 1
    assert steps <= OUTLIER / (0.25 * (1 - RESERVE))


def test_what_others_have_saved_or_are_owed_ends_with_them() -> None:
    allowance = Allowance(0.25)
    allowance.note_step(DECODE, 0.02, in_peace=True)
    allowance.spend(5.0)
    allowance.forgive()
    allowance.note_step(DECODE, 0.02, in_peace=True)
    assert allowance.left


@pytest.mark.parametrize("share", [0.05, 0.25, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_streaming_goes_on_before_long_on_a_machine_that_holds_everything_up(seed: int, share: float) -> None:
    chance = random.Random(seed)
    machine = Machine(Allowance(share), chance, slowdown=20.0, layers_a_burst=1, burst_s=0.1)
    layers, waited, longest = 0, 0, 0
    for _ in range(5000):
        machine.layer_s = 60.0 if chance.random() < 0.1 else 0.004
        machine.step(0.02 * chance.choice([1, 1, 1, 3, 30]), Work(*chance.choice([DECODE, (64, 20_000)])))
        waited = 0 if machine.layers > layers else waited + 1
        layers, longest = machine.layers, max(longest, waited)
    reading = 5  # steps while what is read is under way
    assert longest <= 2 * (OWED_MAX / (share * (1 - RESERVE)) + PEACE_STEPS + reading), (
        f"nothing was streamed for {longest} steps"
    )


def test_what_is_owed_for_a_turn_that_was_held_up_is_paid_off_in_so_many_steps() -> None:
    allowance = Allowance(0.25)
    allowance.note_step(DECODE, 0.02, in_peace=True)
    allowance.spend(600.0)
    steps = 0
    while not allowance.left:
        allowance.note_step(DECODE, 0.02, in_peace=True)
        steps += 1
    earned = 0.25 * (1 - RESERVE)
    assert OWED_MAX / earned <= steps <= OWED_MAX / earned + 2
