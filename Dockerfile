# octavo in a container, on CPUs or on one NVIDIA GPU. podman takes this file as it is, too.
#
#     docker build --tag octavo .
#     docker run --rm --init --publish 8000:8000 octavo
#
# serve the demo model at http://127.0.0.1:8000, and after the image's name one can give another
# command, such as a model in a directory DIR:
#
#     docker run --rm --init --publish 8000:8000 --volume DIR:/model:ro octavo \
#         serve /model --host 0.0.0.0
#
# `--volume octavo-cache:/home/octavo/.cache` keeps what the first start compiles, and models of the
# hub, for later containers.
#
# CPU: where pip's index offers PyTorch for NVIDIA GPUs, name one with the CPU build, which is some
# gigabytes smaller: `--build-arg PIP_EXTRA_INDEX_URL=...` (PyTorch's own page tells its address).
#
# GPU: take that build for NVIDIA GPUs, which brings CUDA's libraries along, so that the base stays
# the same; the host needs the driver and NVIDIA's container toolkit. Triton builds its launchers
# with a C compiler when the server starts:
#
#     docker build --build-arg EXTRAS=gpu,structured --build-arg PACKAGES="gcc libc6-dev" --tag octavo-gpu .
#     docker run --rm --init --gpus all --publish 8000:8000 octavo-gpu
FROM python:3.12-slim

ARG PACKAGES=""
RUN test -z "$PACKAGES" || { apt-get update && \
    apt-get install --yes --no-install-recommends $PACKAGES && rm -rf /var/lib/apt/lists/*; }

# What octavo needs comes first, for an empty package of its name: so this layer, the large one,
# outlives changes of octavo itself.
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL
ARG EXTRAS="structured"
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
RUN mkdir --parents src/octavo && touch src/octavo/__init__.py && \
    pip install --no-cache-dir ".${EXTRAS:+[$EXTRAS]}"
COPY src src
RUN pip install --no-cache-dir --no-deps --force-reinstall .

# The server needs no rights and writes nothing but caches, below the home directory.
RUN useradd --create-home octavo && install --directory --owner octavo /home/octavo/.cache
USER octavo
WORKDIR /home/octavo

EXPOSE 8000
HEALTHCHECK --start-period=120s CMD \
    python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=5)"
ENTRYPOINT ["octavo"]
CMD ["serve", "demo", "--host", "0.0.0.0", "--num-blocks", "1024"]
