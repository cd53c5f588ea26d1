"""`kgen learn`: fit rules that choose the rows of problems that were not tuned."""

from kgen.learn.job import LearnJob, Learnt, learn
from kgen.learn.report import load_learning, print_learning

__all__ = ["LearnJob", "Learnt", "learn", "load_learning", "print_learning"]
