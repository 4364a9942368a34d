"""The network, floor by floor: attention -> transformer -> encoders -> crossmodal -> retrieval_model."""
