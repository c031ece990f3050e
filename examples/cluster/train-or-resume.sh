#!/bin/bash
# One process of a training: begins the run, or goes on with it. RECIPE, RUN and further options come as words:
#
#   torchrun --nproc-per-node 8 --max-restarts 3 --no-python ./train-or-resume.sh RECIPE RUN [OPTION ...]
#
# All processes look before any of them can write: they first meet in the process group.
set -euo pipefail
recipe=$1 run=$2
shift 2
if [ -e "$run/recipe.yaml" ]; then
  exec polyformer train --resume "$run"
fi
exec polyformer train "$recipe" --out "$run" "$@"
