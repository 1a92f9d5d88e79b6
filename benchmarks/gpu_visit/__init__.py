"""What ten minutes on a machine with one GPU can tell: `bash benchmarks/gpu_visit.sh OUT`.

The process that leads the visit imports the standard library alone, so that nothing on the machine can break it.
Everything else runs in processes of its own, each with a time limit: most are forked from one that has imported the
package, which takes longer than a short training.
"""
