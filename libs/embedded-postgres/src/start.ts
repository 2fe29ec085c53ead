import { chmodSync } from 'node:fs';
import { join } from 'node:path';
import { unprivilegedAccount } from './account';
import { usableBinaries } from './binaries';
import { assertVersion, keptDataFolder, temporaryDataFolder, type DataFolder } from './data-folder';
import { ensureDatabase } from './database';
import { EmbeddedPostgresError } from './errors';
import { waitForFormerServer } from './former-server';
import { freePort } from './free-port';
import { Guard } from './guard';
import { initdb } from './initdb';
import type { EmbeddedPostgres, EmbeddedPostgresOptions } from './options';
import { giveTo } from './ownership';
import { nativeFolder } from './platform-package';
import { RunningServer } from './running-server';
import { ServerProcess, type ServerCommand } from './server-process';
import { serverSettings } from './settings';
import { createWorkFolder } from './work-folder';

const PORT_ATTEMPTS = 5;

/**
 * Starts a PostgreSQL server from the binaries that npm installed, on a free port of 127.0.0.1, in about a second.
 *
 * The server ends with this process, however it dies, and never before: signals to this process or its group do not
 * reach it. Call {@link EmbeddedPostgres.stop} at the end of an orderly shutdown.
 *
 * @throws EmbeddedPostgresError with a `code`, and a message that says what to do.
 */
export async function startEmbeddedPostgres(options: EmbeddedPostgresOptions = {}): Promise<EmbeddedPostgres> {
  nativeFolder();
  const unprivileged = await unprivilegedAccount();
  const keep = options.dataDir === undefined ? undefined : await keptDataFolder(options.dataDir, unprivileged);
  const account = keep ? keep.account : unprivileged;
  const workFolder = await createWorkFolder(account);
  const folder = keep ?? temporaryDataFolder(workFolder, account);
  const dataDir = folder.path;
  const stopMode = keep ? 'fast' : 'immediate';
  const guard = await Guard.start({ workFolder, dataDir, kept: keep !== undefined, mode: stopMode });
  try {
    const context = { account, cwd: workFolder };
    const durable = options.durable ?? keep !== undefined;
    const binaries = await usableBinaries(context, workFolder);
    assertVersion(folder, binaries.majorVersion);
    if (folder.version !== undefined) await waitForFormerServer(dataDir);
    else if (options.populate && !keep) await populateFolder(folder, options.populate);
    else await initdb(binaries.initdb, dataDir, durable, context, guard);
    const settings = serverSettings(durable, options.settings);
    const logFile = join(workFolder, 'postgres.log');
    const { server, command } = await startOnFreePort({
      program: binaries.postgres,
      dataDir,
      settings,
      logFile,
      context,
      guard,
    });
    const database = options.database ?? 'leasehold';
    await ensureDatabase(command.port, database);
    return new RunningServer(server, command, database, stopMode);
  } catch (error) {
    await guard.finish();
    throw error;
  }
}

async function populateFolder(folder: DataFolder, populate: (dataDir: string) => Promise<void>): Promise<void> {
  await populate(folder.path);
  giveTo(folder.path, folder.account);
  chmodSync(folder.path, 0o700);
}

async function startOnFreePort(
  start: Omit<ServerCommand, 'port'>,
): Promise<{ server: ServerProcess; command: ServerCommand }> {
  for (let attempt = 1; ; attempt++) {
    const command = { ...start, port: await freePort() };
    try {
      return { server: await ServerProcess.start(command), command };
    } catch (error) {
      const taken = error instanceof EmbeddedPostgresError && error.code === 'PORT_TAKEN';
      if (!taken || attempt === PORT_ATTEMPTS) throw error;
    }
  }
}
