"""The data doctor: one pass over a set: what is broken, doubled, leaked, too long; and what to leave out."""

from vlretrieval.data.doctor.examine import Finding, Report, examine

__all__ = ["Finding", "Report", "examine"]
