"""The run.sh of an elastic run on Kubernetes: one JobSet after another, each on nodes that work.

A run that lost nothing may take as many nodes as its plan gives it: the cluster brings them, or the
JobSet waits. One that lost a node takes those that are ready, until all are back.
"""

from maxramp.commandline import shell_quote
from maxramp.errors import EXIT_STAGE_END
from maxramp.files.place import Place

# Words between @ are filled in by `gke.manifests`; `gke._HEAD` comes before.
FOLLOW = r"""
of_jobset() { echo "jobset.sigs.k8s.io/jobset-name=$name"; }
pods() { kubectl -n @NAMESPACE@ get pods -l "$(of_jobset)" -o "jsonpath=$1"; }
publish() {  # counts the nodes that are ready, in whole slices, and tells the trainer
    ready='{.status.conditions[?(@.type=="Ready")].status}'
    pool='{.metadata.labels.cloud\.google\.com/gke-nodepool}'
    count=$(kubectl get nodes -l '@SELECTOR@' \
        -o "jsonpath={range .items[*]}pool-$pool $ready {.spec.unschedulable}{\"\n\"}{end}" |
        grep ' True $' | sort | uniq -c | awk '{n += $1 - $1 % @OF_SLICE@} END {print n + 0}')
    available=$count
    [ -e lost ] || available=@ALL_NODES@
    kubectl -n @NAMESPACE@ create configmap @LAUNCH@-nodes "--from-literal=nodes=$available" \
        --dry-run=client -o yaml | kubectl apply -f - > /dev/null
}
# Files that outlive this script: `whole` says that the JobSet has had its nodes; `lost`, how many
# the one had that lost the first.
lost_node() {
    [ "$count" -lt "$nodes" ] || touch whole
    { { [ -e whole ] || [ -e lost ]; } && [ "$count" -lt "$nodes" ]; } ||
        pods '{.items[*].status.conditions[?(@.type=="DisruptionTarget")].status}' | grep -q True
}
# The JobSet that is there, of a run.sh that was ended.
name=$(kubectl -n @NAMESPACE@ get jobset -l 'maxramp/launch=@LAUNCH@' \
    -o 'jsonpath={.items[0].metadata.name}' 2> /dev/null || true)
nodes=${name##*-}
nodes=${nodes:-@FIRST@} want=${nodes:-@FIRST@}
while :; do
    name=@LAUNCH@-$nodes next=''
    publish
    until kubectl apply -f "$name.yaml" > /dev/null && is Completed 10s; do
        stop_if_failed
        publish
        if lost_node; then
            echo "$name lost a node; $count are ready"
            [ -e lost ] || echo "$nodes" > lost
            next=0
            break
        fi
    done
    # Pods that end before a stage on other nodes say how many it takes.
    said='{.items[*].status.containerStatuses[?(@.name=="train")].state.terminated.message}'
    [ "$next" ] || next=$(pods "$said" | tr ' ' '\n' | sort -n | tail -n 1)
    [ "$next" ] || exit 0
    kubectl -n @NAMESPACE@ delete jobset "$name" --cascade=foreground --timeout=@PATIENCE@s ||
        kubectl -n @NAMESPACE@ delete pods -l "$(of_jobset)" --force
    rm -f whole
    if [ "$next" != 0 ]; then
        want=$next
        [ ! -e lost ] || [ "$next" -lt "$(cat lost)" ] || mv lost whole
    fi
    while [ "$next" = 0 ]; do
        for fits in @COUNTS@; do
            [ "$fits" -gt "$count" ] || [ "$fits" -gt "$want" ] || next=$fits
        done
        [ "$next" != 0 ] || sleep 10
        publish
    done
    nodes=$next
done
"""


def say_nodes(folder: Place) -> str:
    """The line of a pod's script that leaves the nodes of the next stage as its last words."""
    program = "import json, sys; from maxramp.files.place import place; "
    program += "file = place(sys.argv[1]) / 'next_stage.json'; "
    program += "print(json.loads(file.read_bytes())['nodes'])"
    command = shell_quote(["python", "-c", program, folder])
    return f'[ "$status" != {EXIT_STAGE_END} ] || {command} > /dev/termination-log || exit 1\n'
