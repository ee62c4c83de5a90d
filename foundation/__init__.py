"""The ground floor: errors, files, locks, checksums, the hub and object storage, which every other package uses."""
