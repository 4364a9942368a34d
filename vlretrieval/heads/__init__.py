"""The head laboratory: record, measure, compare, close, remove and share attention heads, from outside the model.

Reading order: layers, record, passes, measures, places, figures, position_sums, statistics, roles, diversity; ablate,
pair_loss, pruning_curve, gates; surgery, prune, convert, store; examples, laboratory (one examination), verdict, plain,
pictures, page; study is the command's.
"""
