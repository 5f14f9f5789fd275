# What a node of a cluster runs: `docker build -t raydistill .` in this folder. The CUDA libraries come with torch; the host
# needs an NVIDIA driver and its container toolkit.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
COPY requirements.lock /build/
RUN python -m venv /opt/raydistill \
    && /opt/raydistill/bin/pip install --no-cache-dir --require-hashes -r /build/requirements.lock
COPY pyproject.toml README.md LICENSE /build/
COPY service /build/service
COPY trainables /build/trainables
RUN /opt/raydistill/bin/pip install --no-cache-dir --no-deps --no-build-isolation /build

FROM ${BASE}
# KubeRay's probes call wget; Ray finds out about other processes with procps.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends procps wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 ray
COPY --from=build /opt/raydistill /opt/raydistill
ENV PATH=/opt/raydistill/bin:$PATH PYTHONUNBUFFERED=1
USER ray
WORKDIR /home/ray
CMD ["distill", "--help"]
