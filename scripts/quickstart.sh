#!/usr/bin/env bash
# Train, evaluate, export and search on the built-in scenes. Does all the set-up itself; needs Python 3.11 or newer.
#   bash scripts/quickstart.sh            the real thing
#   bash scripts/quickstart.sh --short    a minute's worth of it, to see that every part works (QUICKSTART_SHORT=1)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/set_up.sh

short=${QUICKSTART_SHORT:-0}
for word in "$@"; do
    case $word in
        --short) short=1 ;;
        *) echo "error: unknown argument '$word'; there is --short" >&2; exit 2 ;;
    esac
done

train=()
if [ "$short" = 1 ]; then
    train=(data.source.train=256 data.source.val=32 data.source.test=48 data.batch_size=32 trainer.max_epochs=1)
fi

set_up

name=quickstart number=1
while [ -e "runs/$name" ]; do
    number=$((number + 1)) name=quickstart-$number
done
run=runs/$name
step() { printf '\n== %s ==\n' "$*"; }

step "1 of 4: train ($run)"
vlretrieval-train experiment=quickstart "name=$name" "${train[@]}"

step "2 of 4: evaluate on scenes it has not seen"
vlretrieval-evaluate "checkpoint=$run/checkpoints/best.ckpt" rerank.weight=val

step "3 of 4: export"
vlretrieval-export "checkpoint=$run/checkpoints/best.ckpt" "output=$run/export"

step "4 of 4: search with the export"
python scripts/scene_pictures.py "$run/checkpoints/best.ckpt" "$run/pictures" 48
text=$(head -n 1 "$run/pictures/captions.txt")
echo "Pictures for the text: $text"
vlretrieval-search "model=$run/export" "images=$run/pictures" "text=$text" top=5
echo
echo "Texts for the picture: $run/pictures/0000.png (line 1 is its own)"
vlretrieval-search "model=$run/export" "image=$run/pictures/0000.png" "texts=$run/pictures/captions.txt" top=5

cat <<END

Done.
  pictures              $run/pictures
  checkpoints           $run/checkpoints
  metrics of training   $run/metrics.csv
  evaluation            $run/evaluation/test/metrics.json
  exported model        $run/export
END
