"""Evaluation: what a model, or a file of embeddings, is worth, and under which protocol.

Reading order: inputs, sharing, encode, shortlist, rerank, hard_negatives, evaluate, table.
"""
