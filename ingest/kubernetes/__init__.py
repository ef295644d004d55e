"""Kubernetes: read its workloads, pods and nodes by list and watch."""
