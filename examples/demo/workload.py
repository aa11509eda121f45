"""What the demo trains: several questions about handwritten digits, in phases that use fewer and fewer parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

PIXELS = 64
GREY_LEVELS = 17
PATCH_PIXELS = 4
# Every patch of 2 x 2 pixels that there can be is a word.
VOCABULARY = GREY_LEVELS**PATCH_PIXELS
# A row of this width is as long as the shortest unit of the hook's, so that a unit is a row.
WORD_FEATURES = 64
WORD_TABLE = "words.0.weight"
WORD_PENALTY = 1e-4
LOWER_LAYERS = 4
BRANCH_LAYERS = 2
TEST_SAMPLES = 360


@dataclass(frozen=True, slots=True)
class Task:
    """A question about a digit: its name, how many answers it has, and the answer for a tensor of digits."""

    name: str
    classes: int
    answer: Callable[[Tensor], Tensor]


def _is_one_of(*digits: int) -> Callable[[Tensor], Tensor]:
    return lambda digit: torch.isin(digit, torch.tensor(digits)).long()


TASKS = (
    Task("which digit", 10, lambda digit: digit),
    Task("even or odd", 2, lambda digit: digit % 2),
    Task("five or more", 2, lambda digit: (digit >= 5).long()),
    Task("has a loop", 2, _is_one_of(0, 6, 8, 9)),
    Task("is a prime", 2, _is_one_of(2, 3, 5, 7)),
    Task("multiple of 3", 2, lambda digit: (digit % 3 == 0).long()),
)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of training; each phase keeps what the one before skipped and adds one reason to skip more."""

    title: str
    own_task_only: bool = False
    lower_frozen: bool = False
    branch_in_some_steps: bool = False
    words_penalised: bool = True

    def tasks(self, rank: int, world_size: int, step: int) -> tuple[int, ...]:
        """Return the tasks that ``rank`` trains in ``step``: all, or one that changes from step to step."""
        if not self.own_task_only:
            return tuple(range(len(TASKS)))
        return ((step * world_size + rank) % len(TASKS),)

    def takes_branch(self, rank: int, world_size: int, step: int) -> bool:
        """Say whether ``rank`` takes the branch: of four steps one on every rank, one on a single rank, two nowhere."""
        if not self.branch_in_some_steps or step % 4 == 0:
            return True
        return step % 4 == 2 and rank == (step // 4) % world_size


PHASES = (
    Phase("everything is used"),
    Phase("each rank trains its own task", own_task_only=True),
    Phase("also: lower layers frozen", own_task_only=True, lower_frozen=True),
    Phase("also: branch only in some steps", own_task_only=True, lower_frozen=True, branch_in_some_steps=True),
    Phase(
        "also: only the words of a batch",
        own_task_only=True,
        lower_frozen=True,
        branch_in_some_steps=True,
        words_penalised=False,
    ),
)


def read_words(pixels: Tensor) -> Tensor:
    """Return the words of images (samples, 64): (samples, 16), for each patch of 2 x 2 pixels which of all it is."""
    levels = ((pixels + 1.0) * 8.0).long().view(-1, 4, 2, 4, 2)
    patches = levels.transpose(2, 3).reshape(-1, PIXELS // PATCH_PIXELS, PATCH_PIXELS)
    return (patches * GREY_LEVELS ** torch.arange(PATCH_PIXELS)).sum(dim=2)


class Layer(nn.Module):
    """A residual layer of ``hidden`` x ``hidden`` weights.

    Smooth on purpose: with ReLU, two runs on three ranks that differ by one rounding are 1e-2 apart after 400 steps,
    with GELU 2e-7, so that a small tolerance tells a rounding from an error.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, hidden) to (batch, hidden)."""
        return x + functional.gelu(self.linear(self.norm(x)))


class MultiTaskModel(nn.Module):
    """A trunk (lower layers, an upper layer, a branch that a step may leave out) and one head for each task.

    Beside the lower layers, a large table holds an embedding of each word, that is, of each patch of an image.

    Args:
        hidden: width of every layer; a layer of the trunk has about ``hidden ** 2`` parameters.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        first = nn.Sequential(nn.Linear(PIXELS, hidden), Layer(hidden))
        self.lower = nn.Sequential(first, *(Layer(hidden) for _ in range(LOWER_LAYERS - 1)))
        self.words = nn.Sequential(nn.EmbeddingBag(VOCABULARY, WORD_FEATURES), nn.Linear(WORD_FEATURES, hidden))
        self.upper = Layer(hidden)
        self.branch = nn.Sequential(*(Layer(hidden) for _ in range(BRANCH_LAYERS)))
        self.heads = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(hidden), nn.Linear(hidden, hidden // 2), nn.GELU(), nn.Linear(hidden // 2, task.classes)
            )
            for task in TASKS
        )

    def forward(self, pixels: Tensor, tasks: tuple[int, ...], take_branch: bool) -> list[Tensor]:
        """Return the logits of each of ``tasks``, (batch, classes), for ``pixels``, (batch, 64)."""
        x = self.upper(self.lower(pixels) + self.words(read_words(pixels)))
        if take_branch:
            x = self.branch(x)
        return [self.heads[task](x) for task in tasks]


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """The parameters whose names start with ``prefix``, shown as one row of the picture."""

    label: str
    prefix: str


GROUPS = (
    *(ParameterGroup(f"lower layer {i + 1}", f"lower.{i}.") for i in range(LOWER_LAYERS)),
    ParameterGroup("words", "words."),
    ParameterGroup("upper layer", "upper."),
    ParameterGroup("branch", "branch."),
    *(ParameterGroup(f"head: {task.name}", f"heads.{i}.") for i, task in enumerate(TASKS)),
)


@dataclass(frozen=True, slots=True)
class Digits:
    """scikit-learn's handwritten digits: pixels (samples, 64) in [-1, 1] and digits (samples,), split once."""

    train_pixels: Tensor
    train_digits: Tensor
    test_pixels: Tensor
    test_digits: Tensor

    def batch(self, rank: int, world_size: int, step: int, batch_size: int) -> tuple[Tensor, Tensor]:
        """Return this rank's ``batch_size`` samples of ``step``; the ranks walk through the data side by side."""
        first = (step * world_size + rank) * batch_size
        rows = torch.arange(first, first + batch_size) % len(self.train_digits)
        return self.train_pixels[rows], self.train_digits[rows]


def load_digits(seed: int) -> Digits:
    """Load the digits that come with scikit-learn, shuffled by ``seed``; nothing is downloaded."""
    from sklearn import datasets

    pixels, digits = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
    x = torch.from_numpy(pixels).float()[order] / 8.0 - 1.0
    y = torch.from_numpy(digits).long()[order]
    return Digits(x[TEST_SAMPLES:], y[TEST_SAMPLES:], x[:TEST_SAMPLES], y[:TEST_SAMPLES])


def measure_accuracy(model: nn.Module, digits: Digits) -> list[float]:
    """Return, for each task, the fraction of test samples that ``model`` answers right."""
    model.eval()
    with torch.no_grad():
        logits = model(digits.test_pixels, tuple(range(len(TASKS))), True)
    model.train()
    return [
        float((task_logits.argmax(1) == task.answer(digits.test_digits)).float().mean())
        for task, task_logits in zip(TASKS, logits, strict=True)
    ]


def compute_loss(
    ddp: nn.Module,
    pixels: Tensor,
    digits: Tensor,
    tasks: tuple[int, ...],
    take_branch: bool,
    penalise_words: bool,
) -> Tensor:
    """Return the mean cross entropy over ``tasks``, and a penalty on the squares of all words if ``penalise_words``.

    With the penalty, every row of the table has a gradient; without it, only the rows of the batch's words have one.
    """
    logits = ddp(pixels, tasks, take_branch)
    losses = [
        functional.cross_entropy(each, TASKS[task].answer(digits)) for task, each in zip(tasks, logits, strict=True)
    ]
    loss = torch.stack(losses).mean()
    if penalise_words:
        loss = loss + WORD_PENALTY * ddp.get_parameter(f"module.{WORD_TABLE}").square().sum()
    return loss
