#!/bin/bash
# For slurm.conf's Epilog=, on clusters whose ProctrackType does not end a job's processes with the job (proctrack/cgroup does).
# Tells the ended job's agents, and nobody else's, to end: those that its ranks started themselves would stay for
# KCOORD_IDLE_TIMEOUT. They finish their publishes meanwhile; nothing here waits for them, and it never fails.
job=${SLURM_JOB_ID:-}
case $job in '' | *[!0-9]*) exit 0 ;; esac
for process in /proc/[0-9]*; do
	tr '\0' ' ' <"$process/cmdline" 2>/dev/null | grep -q -e ' -m kcoord\.agent ' -e 'kcoord agent' || continue
	tr '\0' '\n' <"$process/environ" 2>/dev/null | grep -q -x "SLURM_JOB_ID=$job" || continue
	kill -TERM "${process#/proc/}" 2>/dev/null
done
exit 0
