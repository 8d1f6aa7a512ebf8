# The image of a job, for --cluster gke and for containers under SLURM:
#
#   docker build --build-arg EXTRAS=tpu,data,gcs --tag maxramp .
FROM python:3.12-slim

# What is installed beside the trainer: extras of pyproject.toml.
ARG EXTRAS=cuda13,data,gcs

WORKDIR /opt/maxramp
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY maxramp maxramp
RUN python -m pip install --no-cache-dir "./[${EXTRAS}]"

WORKDIR /work
CMD ["python", "-m", "maxramp"]
