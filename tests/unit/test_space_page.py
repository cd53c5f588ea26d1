"""docs/search-spaces.md: every block loads, and every quoted message is a message of kgen."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from space_files import SIGNATURE, load

from kgen.catalogue import Catalogue, load_population, open_catalogue
from kgen.catalogue.bodies import VARIANT_KEYS
from kgen.errors import SpaceError
from kgen.model.space import Space
from kgen.operators.base import Operator

PAGE = Path(__file__).resolve().parents[2] / "docs" / "search-spaces.md"
KINDS = {"cuda template", "yaml file", "yaml variant", "yaml mistake", "yaml family",
         "yaml population", "text message"}  # fmt: skip


def blocks() -> list[tuple[int, str, str]]:
    """(line, kind, text) of the page's blocks."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.finditer(r"^```(.+?)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, m.start()) + 1, m[1], m[2]) for m in found]


class ScaleAlone(Catalogue):
    """Has the operator of the page."""

    def operator(self, name: str) -> Operator:
        assert name == "scale"
        return replace(open_catalogue().operator("rmsnorm"), name="scale", signature=SIGNATURE)


class Reader:
    """Loads the blocks one after the other, with the templates that the page has shown so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.template = ""
        self.family = ""
        self.message = ""

    def space(self, text: str) -> Space:
        """Load a file, with its variants `rows` and `naive` of the template shown last."""
        for name in ("scale", "scales"):
            folder = self.folder / "templates" / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "forward_rows.cu.jinja").write_text(self.template, encoding="utf-8")
        return load(self.folder, text, family=self.family, templates={"naive": self.template})

    def variant(self, entries: str) -> Space:
        """Load a file with a variant of these entries, and the naive one."""
        args = {"args": {"columns": "N"}} if "columns" in self.template else {}
        launch = {"kernel": "scale_forward", "grid": "M", "block": "threads", **args}
        choices = {"threads": [128, 256], "vec": [8, 4, 1]}
        base = {"doc": "An example.", "params": choices, "launch": [launch]}
        variants = {
            "rows": {**base, **yaml.safe_load(entries)},
            "naive": {**base, "safe": {"threads": 128, "vec": 1}},
        }
        text = yaml.safe_dump({"operator": "scale", "passes": {"forward": variants}})
        return self.space(text)

    def read(self, kind: str, text: str) -> None:
        """Do what a block stands for."""
        if kind == "cuda template":
            self.template = text
        elif kind == "yaml family":
            self.family = text
        elif kind == "yaml file":
            assert self.space(text).variant("forward", "rows").launches
        elif kind == "yaml variant":
            assert self.variant(text).variant("forward", "rows").launches
        elif kind == "yaml population":
            file = self.folder / "ours.yaml"
            file.write_text(text, encoding="utf-8")
            population = load_population(str(file), ScaleAlone([]))
            assert len(population.problems("scale", "forward")) == 12
        elif kind == "yaml mistake":
            entries = {"doc": "x", "launch": [{"kernel": "scale_forward", "grid": 1, "block": 1}]}
            params = {"threads": [128], **yaml.safe_load(text)}
            with pytest.raises(SpaceError) as caught:
                self.variant(yaml.safe_dump({**entries, "params": params}))
            self.message = str(caught.value)
        else:
            short = self.message.replace(f"{self.folder}/templates/scale/", "")
            assert short.partition(": ")[2] == text.rstrip()


def test_the_page(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for line, kind, text in blocks():
        assert kind in KINDS, f"line {line}: {kind}"
        try:
            reader.read(kind, text)
        except SpaceError as error:
            raise AssertionError(f"{PAGE.name}:{line}: {error}") from error


def test_every_key_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for key in (*VARIANT_KEYS, "family", "groups", "ladder", "operator", "passes", "set", "args",
                "smem", "pdl"):  # fmt: skip
        assert re.search(rf"`{key}\b|^ *(- )?{key}:", text, re.MULTILINE), key
