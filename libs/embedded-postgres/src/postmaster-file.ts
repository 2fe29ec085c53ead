import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { errnoOf } from './errors';

/** Fields of `postmaster.pid`, the file by which a server marks its data folder as in use. */
export interface PostmasterFile {
  pid: number;
  /** `starting`, `stopping`, `ready` (takes connections) or `standby` (recovering, takes none). */
  status: string | undefined;
}

// No system gives out this id, so PostgreSQL takes the file for a dead server's.
const NOBODYS_PID = 2147483647;

export function readPostmasterFile(dataDir: string): PostmasterFile | undefined {
  const lines = readLines(dataDir);
  const pid = Number(lines?.[0]);
  return lines !== undefined && Number.isInteger(pid) && pid > 0 ? { pid, status: lines[7]?.trim() } : undefined;
}

/**
 * Tells PostgreSQL that the server named in the file is dead. Only the id changes and the file stays: it also names
 * the shared memory by which PostgreSQL finds out that backends of the dead server still live.
 */
export function disownPostmasterFile(dataDir: string): void {
  const lines = readLines(dataDir);
  if (lines !== undefined) writeFileSync(fileIn(dataDir), [String(NOBODYS_PID), ...lines.slice(1)].join('\n'));
}

function readLines(dataDir: string): string[] | undefined {
  try {
    return readFileSync(fileIn(dataDir), 'utf8').split('\n');
  } catch (error) {
    if (errnoOf(error) === 'ENOENT') return undefined;
    throw error;
  }
}

function fileIn(dataDir: string): string {
  return join(dataDir, 'postmaster.pid');
}
