"""Load operators with their search spaces and templates, GPU profiles, and populations."""

from kgen.catalogue.captured_calls import load_captured_calls
from kgen.catalogue.catalogue import RESERVED_NAMES, Catalogue, Entry, open_catalogue
from kgen.catalogue.gpus import load_profiles, profile_named
from kgen.catalogue.gradients import Links, links_of
from kgen.catalogue.populations import load_population, population_names

__all__ = [
    "RESERVED_NAMES",
    "Catalogue",
    "Entry",
    "Links",
    "links_of",
    "load_captured_calls",
    "load_population",
    "load_profiles",
    "open_catalogue",
    "population_names",
    "profile_named",
]
