"""The part of a batch script under SLURM that runs an elastic job: start after start, each on those
nodes of the allocation that work.

SLURM takes a failed node out of the allocation (`--no-kill`), and the job a drained one. More nodes
come with another job, which the trainer asks for at a save (status 75) once they are idle.
"""

# Words between @ are filled in by `slurm.script`.
RUN = r"""
said=$folder/slurm/$SLURM_JOB_ID.srun        # srun's own messages of the last start
lost_nodes=$folder/slurm/lost_nodes          # a line for every loss
export MAXRAMP_AVAILABLE_NODES=$folder/slurm/$SLURM_JOB_ID.nodes

excluded() {  # lost too often, or by an option of sbatch
    sort "$lost_nodes" 2>/dev/null | uniq -c | awk '$1 >= @MAX_FAILURES@ {print $2}'
    @EXCLUDED@
}
allocated() { scontrol show hostnames "$(squeue -h -j "$SLURM_JOB_ID" -o %N)"; }
in_state() {  # pattern of states, options of sinfo: the nodes in one, without those excluded
    sinfo -h -N -o '%N %T' "${@:2}" | grep -E " ($1)$" | cut -d ' ' -f 1 | sort -u |
        grep -vxF -f <(excluded)
}
healthy() { allocated | grep -xF -f <(in_state 'allocated|mixed-?|idle|completing'); }
idle() { in_state idle -p "$SLURM_JOB_PARTITION"; }

# A job that got all it asked for may get more: the queue decides. One that got fewer takes only
# nodes that become idle later.
others=$((@ALL_NODES@ - @NODES@)) refused=
[ "$(allocated | wc -l)" = @NODES@ ] || others=0 refused=$(idle)
publish() {
    local new
    new=$(idle | grep -cvxF -f <(echo "$refused"))
    echo $(($(healthy | wc -l) + new + others)) > "$MAXRAMP_AVAILABLE_NODES.new"
    mv "$MAXRAMP_AVAILABLE_NODES.new" "$MAXRAMP_AVAILABLE_NODES"
}
drains() { [ -n "$(in_state 'drain(ing|ed).*' -n "$1")" ]; }
watch() {  # nodes in use: asks the trainer to save and end where one drains, once
    until drains "$1"; do
        sleep 10
        publish
    done
    scancel -s TERM "$SLURM_JOB_ID"
}
# Where the node of this script fails, nothing of it is left to see that: another node starts the
# job again.
guard() {  # on which node
    exec srun --overlap --quiet --nodes=1 --ntasks=1 --nodelist="$1" bash -c '
        check() {
            nodes=$(scontrol show hostnames "$(squeue -h -t all -j "$1" -o %N)")
            [ -z "$nodes" ] || grep -qx "$2" <<< "$nodes" && return
            scontrol requeue "$1"
            exit
        }
        trap "check $1 $2; exit" TERM
        while sleep 10 & wait $!; do check "$1" "$2"; done' guard "$SLURM_JOB_ID" "$SLURMD_NODENAME"
}
find_lost() {  # the first that was lost in the last start: with its node, or killed alone
    local of_node='s/^srun: error: Node failure on \(.*\)/\1/p'
    local of_task='s/^srun: error: \([^ ]*\): tasks\{0,1\} [^ ]*: \(Killed\|Bus error\).*/\1/p'
    sed -n "$of_node;$of_task" "$said" | head -n 1 | xargs -r scontrol show hostnames
}
let_go() (  # of nodes that do not work; scontrol leaves files where it is called
    cd "$(mktemp -d)" || return
    scontrol update JobId="$SLURM_JOB_ID" NodeList="$(healthy | paste -sd ,)" > /dev/null
)

want=@NODES@
while :; do
    bad=$(excluded | paste -sd ,)
    # Its nodes are free before the next job takes some.
    options=(--dependency="afterany:$SLURM_JOB_ID" ${bad:+"--exclude=$bad"})
    mapfile -t there < <(healthy)
    nodes=0
    for count in @FITS@ "$want"; do
        [ "$count" -le "$want" ] && [ "$count" -le ${#there[@]} ] && nodes=$count
    done
    if [ "$nodes" = 0 ]; then
        echo "launch   only ${#there[@]} nodes of this job are left"
        submit "$want"
        exit 1
    fi
    before=$(newest)
    used=$(IFS=,; echo "${there[*]:0:nodes}")
    export MAXRAMP_COORDINATOR="${there[0]}:$((20000 + SLURM_JOB_ID % 20000))"
    export MAXRAMP_NUM_PROCESSES=$((nodes * @PER_NODE@))
    publish
    watch "$used" & helpers=$!
    if [ "${there[-1]}" != "$SLURMD_NODENAME" ]; then guard "${there[-1]}" & helpers+=" $!"; fi
    note start null
    { srun --nodelist="$used" --nodes="$nodes" --ntasks="$MAXRAMP_NUM_PROCESSES" \
        --ntasks-per-node=@PER_NODE@ --label --kill-on-bad-exit=0 --wait=@GRACE@ @SRUN@ \
        "${command[@]}" 2>&1 >&3 | tee "$said" >&2; exit "${PIPESTATUS[0]}"; } 3>&1 &
    wait $!
    status=$?
    kill $helpers 2> /dev/null
    note end "$status"
    case $status in
        0 | @CONFIG@) exit "$status" ;;
        @STAGE_END@)
            want=$(next_nodes)
            if [ "$want" = "$nodes" ]; then may_restart 0 || exit "$status"; fi
            if [ "$want" -gt "$(healthy | wc -l)" ]; then
                submit "$want"
                exit "$status"
            fi ;;
        @PREEMPTED@)
            may_restart 0 || exit "$status"
            if ! drains "$used" || drains "$SLURMD_NODENAME" ||
                [ "$(date +%s)" -ge $((limit - @GRACE@)) ]; then
                submit "$want"
                exit "$status"
            fi
            let_go ;;
        *)
            lost=$(find_lost)
            if [ "$status" = 1 ] || [ -z "$lost" ]; then
                may_restart 1 || exit "$status"
            else
                echo "launch   lost $lost"
                echo "$lost" >> "$lost_nodes"
            fi ;;
    esac
done
"""
