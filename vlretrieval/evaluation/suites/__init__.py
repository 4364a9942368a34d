"""Hard-negative suites: edits of any English captions, and the published ones as data sources.

Reading order: words, text_edits, published, winoground.
"""

from vlretrieval.evaluation.suites.published import Aro, SugarCrepe, Valse
from vlretrieval.evaluation.suites.text_edits import with_text_edits
from vlretrieval.evaluation.suites.winoground import Winoground

__all__ = ["Aro", "SugarCrepe", "Valse", "Winoground", "with_text_edits"]
