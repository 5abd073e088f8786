#!/bin/bash
# For slurm.conf's Epilog=, on clusters whose ProctrackType does not end a job's processes with the job (proctrack/cgroup does).
# Tells the agents of the ended job alone to end: those that ranks started would stay for KCOORD_IDLE_TIMEOUT. They finish their
# publishes; this script does not wait for them, and never fails.
job=${SLURM_JOB_ID:-}
case $job in '' | *[!0-9]*) exit 0 ;; esac
for process in /proc/[0-9]*; do
	tr '\0' ' ' <"$process/cmdline" 2>/dev/null | grep -q -e ' -m kcoord\.agent ' -e 'kcoord agent' || continue
	tr '\0' '\n' <"$process/environ" 2>/dev/null | grep -q -x "SLURM_JOB_ID=$job" || continue
	kill -TERM "${process#/proc/}" 2>/dev/null
done
exit 0
