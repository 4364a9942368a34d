"""Evaluation: what a model, or a file of embeddings, is worth, and under which protocol.

Reading order: inputs, sharing, encode, outcome, shortlist, rerank, matching, evaluate (the one function), describe,
table; then protocols, compare, frontier, embedding_files, embed, rankings, further, suites, zero_shot, overlays,
error_page; run is what the commands call.
"""
