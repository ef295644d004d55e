"""The Kubernetes source: it reads workloads, pods and nodes by list and watch."""
