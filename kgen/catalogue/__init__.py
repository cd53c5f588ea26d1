"""What exists: operators with their search spaces and templates, and GPU profiles."""

from kgen.catalogue.catalogue import Catalogue, Entry, open_catalogue
from kgen.catalogue.gpus import load_profiles, profile_named

__all__ = ["Catalogue", "Entry", "load_profiles", "open_catalogue", "profile_named"]
