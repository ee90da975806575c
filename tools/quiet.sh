#!/usr/bin/env bash
# Runs a command with its output in build/log/<name>.log; shows the end of it only when the command fails.
#   tools/quiet.sh <name> <command...>
set -uo pipefail
name=$1
shift
log=build/log/$name.log
mkdir -p build/log
start=$SECONDS
"$@" >"$log" 2>&1 </dev/null
rc=$?
if [ $rc -ne 0 ]; then
  echo "   failed (exit $rc): $*"
  echo "   the last lines of $log:"
  tail -n 60 "$log" | sed 's/^/   | /'
  exit $rc
fi
[ $((SECONDS - start)) -lt 5 ] || echo "   done in $((SECONDS - start)) s"
