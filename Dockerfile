FROM python:3.11-slim AS build
WORKDIR /src
COPY requirements-image.lock ./
RUN python -m venv /opt/fleetcast \
 && /opt/fleetcast/bin/pip install --no-cache-dir --require-hashes -r requirements-image.lock
COPY . .
RUN /opt/fleetcast/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.11-slim
COPY --from=build /opt/fleetcast /opt/fleetcast
RUN useradd --system --uid 10001 --home /var/lib/fleetcast --create-home fleetcast
USER 10001
WORKDIR /var/lib/fleetcast
ENV PATH=/opt/fleetcast/bin:$PATH PYTHONUNBUFFERED=1
EXPOSE 8080
ENTRYPOINT ["fleetcast"]
CMD ["run"]
