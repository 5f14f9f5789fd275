"""A table of published accuracies: the schema of its YAML. The numbers are data, in `service/reproduce/tables`."""

from collections.abc import Collection, Iterable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from service.config import strict_yaml
from service.config.dotted import flatten, merge
from service.config.files import recipes, shipped
from service.config.messages import problems_of, with_sources
from trainables.config import Count, Section
from trainables.errors import ExperimentError, did_you_mean

TABLES = "service.reproduce.tables"
ALONE = "student"
"""The column of students that learn from labels alone."""
Percent = Annotated[float, Field(gt=0, le=100)]
Settings = dict[str, Any]
"""Sections of an experiment: what is different from the table's recipe."""


class Citation(Section):
    """Where numbers come from."""

    paper: str = Field(min_length=1, description="authors, year, title, and the table's number where it is known")
    location: str = Field(min_length=1, description="where the numbers were read, and where the settings")
    compared_with: tuple[str, ...] = Field((), description="further sources of the same numbers")
    epoch: Literal["last", "best"] = Field(description="the epoch whose accuracy was published")
    num_runs: Count = Field(description="runs whose mean was published; 1 where that is not stated")


class Teacher(Section):
    """A teacher's published accuracy, and weights that may replace its training."""

    top1_pct: Percent
    checkpoint: str | None = Field(None, description="the published file, under the folder that --teachers names")
    weights: str | None = Field(
        None, description="weights by name, which are loaded; absent: trained, unless --teachers is given"
    )


class Student(Section):
    """A student's published accuracy without a teacher. Its settings hold with every method too.

    Its name is a model, or a recipe: that one's student, data, optimizer and training.
    """

    top1_pct: Percent | None = Field(None, description="absent: none was published")
    num_runs: Count | None = Field(None, description="where it is not the source's")
    settings: Settings = Field({}, description="what differs from the recipe")


Model = TypeVar("Model", Teacher, Student)


class Models(Section, Generic[Model]):
    """All teachers, or all students, from one source."""

    source: str
    models: dict[str, Model]


class Column(Section):
    """A method as it was run for the table."""

    source: str
    settings: Settings


class Pair(Section):
    """A teacher and a student: what each column has for them, and where its settings differ."""

    teacher: str
    student: str
    top1_pct: dict[str, Percent] = Field(description="column → published accuracy")
    num_runs: dict[str, Count] = Field({}, description="source → runs whose mean it published, where that differs for this pair")
    settings: dict[str, Settings] = Field({}, description="column → what is different for this pair")


class Size(Section):
    """The data that the accuracies are of."""

    train_images: Count
    val_images: Count
    num_classes: Count


class Table(Section):
    """A table of published accuracies, in percent top-1."""

    title: str
    recipe: str = Field(description="the experiment that all cells share: a recipe, or a file in the table's folder")
    data: Size
    tolerance_pct: Percent = Field(description="points that a mean may be off however little its seeds differ")
    sources: dict[str, Citation]
    teachers: Models[Teacher]
    students: Models[Student]
    columns: dict[str, Column]
    pairs: dict[str, Pair]

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        named: dict[str, tuple[Iterable[str], Collection[str]]] = {
            "teachers.source": ([self.teachers.source], self.sources),
            "students.source": ([self.students.source], self.sources),
            **{f"columns.{key}.source": ([column.source], self.sources) for key, column in self.columns.items()},
        }
        for key, pair in self.pairs.items():
            named[f"pairs.{key}.teacher"] = [pair.teacher], self.teachers.models
            named[f"pairs.{key}.student"] = [pair.student], self.students.models
            named[f"pairs.{key}.top1_pct"] = pair.top1_pct, self.columns
            named[f"pairs.{key}.settings"] = pair.settings, pair.top1_pct
            named[f"pairs.{key}.num_runs"] = pair.num_runs, self.sources
        for where, (names, known) in named.items():
            if unknown := [name for name in names if name not in known]:
                raise ValueError(f"{where}: there is no {unknown[0]!r} in this table; it has {', '.join(known)}")
        if ALONE in self.columns:
            raise ValueError(f"columns: {ALONE} means the students alone: choose another name")
        return self

    def source_of(self, column: str) -> Citation:
        """Where a column's numbers come from."""
        return self.sources[self.students.source if column == ALONE else self.columns[column].source]

    def num_runs(self, pair: str, column: str) -> int:
        """Number of runs whose mean was published."""
        row = self.pairs[pair]
        num = self.students.models[row.student].num_runs if column == ALONE else row.num_runs.get(self.columns[column].source)
        return num or self.source_of(column).num_runs

    def published(self, pair: str, column: str) -> float | None:
        """The published accuracy in percent; None where the table has none."""
        row = self.pairs[pair]
        return self.students.models[row.student].top1_pct if column == ALONE else row.top1_pct.get(column)

    def settings(self, pair: str, column: str) -> dict[str, Any]:
        """Dotted keys and values of a cell: the student's, the column's over them, and those of the pair over both."""
        row = self.pairs[pair]
        merged = self.students.models[row.student].settings
        if column != ALONE:
            merged = merge(merge(merged, self.columns[column].settings), row.settings.get(column, {}))
        return flatten(merged)


def shipped_tables() -> dict[str, str]:
    """Shipped tables: name → the comment in their first line."""
    return shipped(TABLES)


def read_table(name: str) -> Table:
    """A shipped table by its name, or a file, whose recipe is a path from the file's folder.

    Raises ExperimentError: there is none, or it is not a table; one line for each problem.
    """
    ours = shipped_tables()
    if name in ours:
        text = (resources.files(TABLES) / f"{name}.yaml").read_text(encoding="utf-8")
    elif Path(name).is_file():
        text = Path(name).read_text(encoding="utf-8", errors="replace")
    else:
        instead = did_you_mean(name, ours, f"tables: {', '.join(ours)}")
        raise ExperimentError(f"{name}: neither a table nor a file; {instead}")
    tree = strict_yaml.parse(text, name)
    try:
        table = Table.model_validate(tree)
    except ValidationError as error:
        raise with_sources(problems_of(error, Table), name) from error
    if name in ours or table.recipe in recipes():
        return table
    return table.model_copy(update={"recipe": str(Path(name).parent / table.recipe)})
