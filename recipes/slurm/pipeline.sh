#!/usr/bin/env bash
# SFT, GRPO and evaluation as three jobs, each from the weights of the one before and only if that succeeded. From the
# root of the repository:
#
#   recipes/slurm/pipeline.sh [--dry-run] CONFIGS OUTPUT [SBATCH OPTION ...] [-- KEY=VALUE ...]
#   recipes/slurm/pipeline.sh configs/llama3_2_3b runs/llama --nodes=2 --gpus-per-node=8 --cpus-per-gpu=8 -- seed=1
#
# CONFIGS holds sft_warmup.yaml, grpo.yaml and evaluate.yaml; OUTPUT gets a folder of each name. Options
# (--name=value) and keys go to every stage, so only keys that all three recipes have (seed, dtype, num_threads, ...); --dry-run prints the commands and needs no Slurm.

set -euo pipefail
shopt -s inherit_errexit  # a stage that cannot be submitted stops the chain

dry_run=false
if [[ ${1:-} == --dry-run ]]; then
  dry_run=true
  shift
fi
usage="usage: $0 [--dry-run] CONFIGS OUTPUT [SBATCH OPTION ...] [-- KEY=VALUE ...]"
configs=${1:?$usage} output=${2:?$usage}
for stage in sft_warmup grpo evaluate; do
  [[ -f $configs/$stage.yaml ]] || { echo "CONFIGS: got '$configs', which has no $stage.yaml" >&2; exit 2; }
done
shift 2
options=()
while (($#)) && [[ $1 != -- ]]; do
  options+=("$1")
  shift
done
overrides=("${@:2}")

submit() {  # submit STAGE RECIPE JOB_BEFORE [KEY=VALUE ...], prints the job's id
  local stage=$1 recipe=recipes/$2_distributed.py after=$3
  local of_job=(--job-name="$stage" "${options[@]}")
  [[ -z $after ]] || of_job+=(--dependency="afterok:$after" --kill-on-invalid-dep=yes)
  local of_recipe=("$recipe" --config "$configs/$stage.yaml" "${overrides[@]}" output_dir="$output/$stage" "${@:4}")
  if $dry_run; then
    recipes/slurm/run.sbatch --dry-run "${of_job[@]}" "${of_recipe[@]}" >&2
    echo "JOB_ID_OF_$stage"
  else
    local id
    id=$(sbatch --parsable "${of_job[@]}" recipes/slurm/run.sbatch "${of_recipe[@]}")
    echo "$stage: job ${id%%;*}" >&2
    echo "${id%%;*}"
  fi
}

sft=$(submit sft_warmup sft_warmup "")
grpo=$(submit grpo grpo_full_finetune "$sft" weights="$output/sft_warmup")
submit evaluate evaluate "$grpo" weights="$output/grpo" >/dev/null
