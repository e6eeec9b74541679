#!/usr/bin/env bash
# Replays $TRACES; the verdicts and incidents go to $GITHUB_STEP_SUMMARY, the exit code to $GITHUB_OUTPUT.
set -uo pipefail
cd "${GITHUB_WORKSPACE:-.}" || exit 2
report="${RUNNER_TEMP:-/tmp}/kvcanary-reports"
code=0
# shellcheck disable=SC2086  # names are separated by spaces
kvcanary-replay --json --report "$report" $TRACES > "$report.json" || code=$?
python "$ACTION/summary.py" < "$report.json" >> "$GITHUB_STEP_SUMMARY"
echo "exit-code=$code" >> "$GITHUB_OUTPUT"
if [ "$code" = 125 ] && [ "${INCONCLUSIVE:-false}" != true ]; then
  code=0
fi
exit "$code"
