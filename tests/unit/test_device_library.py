"""The committed reference of the device library agrees with its headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kgen.assets import include_dir
from kgen.errors import CatalogueError
from kgen.report.device_library import FOLDERS, declarations, device_library_markdown

PAGE = Path(__file__).parents[2] / "docs" / "device-library.md"

HEADER = """\
namespace kgen {
namespace detail {

// Not public.
KGEN_DEVICE int hidden() { return 1; }

}  // namespace detail

// Returns the larger value.
template <class T>
KGEN_DEVICE constexpr T max(T a, T b) {
    return a < b ? b : a;
}
KGEN_DEVICE float max([[maybe_unused]] float a) { return a; }

struct Later;

// A sum.
class Sum {
public:
    KGEN_DEVICE explicit Sum(float x) : sum_(x) {}
    // Adds one value.
    KGEN_DEVICE void add(float x) { sum_ += x; }

private:
    // Not shown.
    KGEN_DEVICE void reset() { sum_ = 0; }

    float sum_;
};

template <>
struct Special<float> {
    int x;
};

}  // namespace kgen
"""


def test_declarations_of_a_header() -> None:
    larger, total = declarations(HEADER.splitlines())
    assert larger.text == ("template <class T>\nconstexpr T max(T a, T b);\nfloat max(float a);")
    assert larger.comment == "Returns the larger value."
    assert (total.text, total.comment) == ("class Sum;", "A sum.")
    assert [(m.text, m.comment) for m in total.members] == [
        ("void add(float x);", "Adds one value.")
    ]


def test_page_is_that_of_the_headers() -> None:
    wanted = device_library_markdown(include_dir())
    assert PAGE.read_text("utf-8") == wanted, (
        "kgen device-library --markdown docs/device-library.md"
    )


def test_public_declarations_of_the_lowest_folders_have_comments() -> None:
    for room in ("primitives", "rows", "toeplitz"):
        for header in sorted((include_dir() / "kgen" / room).glob("*.cuh")):
            for declaration in declarations(header.read_text("utf-8").splitlines()):
                assert declaration.comment, f"{header}: {declaration.text}"


def test_every_folder_but_the_host_layer_is_in_it() -> None:
    folders = {p.name for p in (include_dir() / "kgen").iterdir() if p.is_dir()}
    assert {*FOLDERS, "host"} == folders


def test_a_folder_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match="primitives is missing"):
        device_library_markdown(tmp_path)
