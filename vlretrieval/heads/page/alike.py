"""How alike the heads of a layer are: matrices of distances."""

from __future__ import annotations

from html import escape

from vlretrieval.heads.diversity import Diversity
from vlretrieval.heads.laboratory import Findings


def alike(found: Findings) -> str:
    """Matrices of the heads of each layer: their maps, outputs and weights."""
    if not found.alike:
        return ""
    parts = [
        "<p>Maps: Jensen-Shannon divergence in bits, 0 the same map, 1 nothing in common. Outputs: CKA, 1 the same up "
        "to a turn and a scale. Weights: cosine of what the weights do, 1 the same, 0 unrelated.</p>"
    ]
    for layer in found.alike.values():
        parts.append(f"<h3>{escape(layer.title)}</h3><div class=trio>{_matrices(layer)}</div>")
    return "".join(parts)


def _matrices(layer: Diversity) -> str:
    made = []
    for name, matrix in (
        ("maps, bits apart", layer.maps),
        ("outputs, CKA", layer.outputs),
        ("weights, cosine", layer.weights),
    ):
        top = "".join(f'<th scope="col">{number + 1}</th>' for number in range(len(matrix)))
        rows = "".join(
            f'<tr><th scope="row">{number + 1}</th>'
            + "".join(
                f'<td style="background:rgba(var(--heat),{0.55 * min(1.0, max(0.0, value)):.2f})">{value:.2f}</td>'
                for value in row
            )
            + "</tr>"
            for number, row in enumerate(matrix.tolist())
        )
        made.append(
            f"<div class=scroll><table class=matrix><caption>{name}</caption><thead><tr><td></td>{top}</tr></thead>"
            f"<tbody>{rows}</tbody></table></div>"
        )
    return "".join(made)
