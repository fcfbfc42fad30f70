# A daemon in a container:  docker build -t carpool .  and docs/service.md, "In a container".
# The wheel of torch brings its CUDA libraries; the driver comes with `docker run --gpus all`.

FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src ./src
# Without build isolation, so that what builds the wheel is pinned like everything else.
RUN python -m venv /opt/carpool \
 && /opt/carpool/bin/pip install --no-cache-dir -c constraints.txt hatchling \
 && /opt/carpool/bin/pip install --no-cache-dir -c constraints.txt --no-build-isolation ".[torch,serve]"

FROM python:3.11-slim-bookworm
RUN useradd --uid 10001 --create-home carpool \
 && install -d -o carpool -g carpool -m 0700 /var/lib/carpool \
 && install -d -o carpool -g carpool /work
COPY --from=build /opt/carpool /opt/carpool
ENV PATH=/opt/carpool/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    CARPOOL_STATE=/var/lib/carpool \
    CARPOOL_ROOTS=/work
# All jobs run as this user, too.
USER carpool
WORKDIR /work
VOLUME ["/var/lib/carpool"]
EXPOSE 7637
# Asks the daemon over its own socket: it is well when it can list jobs.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["carpool", "ps", "--limit", "1"]
# SIGTERM halts all jobs with checkpoints, which takes its time: docker stop --time 120.
STOPSIGNAL SIGTERM
ENTRYPOINT ["carpool"]
CMD ["serve"]
