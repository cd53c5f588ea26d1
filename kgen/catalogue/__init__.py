"""What exists: operators with their search spaces and templates, and GPU profiles."""

from kgen.catalogue.catalogue import Catalogue, Entry, open_catalogue
from kgen.catalogue.gpus import load_profiles, profile_named
from kgen.catalogue.gradients import Links, links_of

__all__ = [
    "Catalogue",
    "Entry",
    "Links",
    "links_of",
    "load_profiles",
    "open_catalogue",
    "profile_named",
]
