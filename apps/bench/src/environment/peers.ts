import { spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { BenchError } from '../errors';
import { PEERS_FOLDER, ROOT } from '../paths';

const MODULES = join(PEERS_FOLDER, 'node_modules');
const LOCK = join(PEERS_FOLDER, 'package-lock.json');
/** Holds the hash of the lock file that was installed. */
const STAMP = join(MODULES, '.installed-lock');

/** Installs the peers in their own folder, unless what their lock file says is there already. @throws BenchError */
export async function installPeers(signal: AbortSignal, log: (text: string) => void): Promise<void> {
  const hash = createHash('sha256').update(readFileSync(LOCK)).digest('hex');
  if (existsSync(STAMP) && readFileSync(STAMP, 'utf8') === hash) return;
  log('installing the peers (npm ci in apps/bench/peers, once) …');
  // No scripts: what has a native part brings it prebuilt.
  const { code, output } = await run('npm', ['ci', '--ignore-scripts', '--no-audit', '--no-fund'], signal);
  if (code !== 0) {
    throw new BenchError(
      `The peers cannot be installed: npm ci in ${PEERS_FOLDER} ended with ${code}. --peers none measures Leasehold alone.\n${output}`,
    );
  }
  writeFileSync(STAMP, hash);
}

async function run(
  command: string,
  args: string[],
  signal: AbortSignal,
): Promise<{ code: number | string; output: string }> {
  const child = spawn(command, args, {
    cwd: PEERS_FOLDER,
    stdio: ['ignore', 'pipe', 'pipe'],
    env: environmentOfNpm(),
    shell: process.platform === 'win32',
    signal,
  });
  let output = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', (chunk: Buffer) => (output = (output + chunk.toString()).slice(-4000)));
  }
  const code = await new Promise<number | string>((resolve) => {
    child.once('error', (error) => resolve(error.message));
    child.once('close', (exitCode, by) => resolve(exitCode ?? by ?? 'an unknown end'));
  });
  signal.throwIfAborted();
  return { code, output };
}

/** `npm run` tells its children where its own project is; this npm must find another. */
function environmentOfNpm(): NodeJS.ProcessEnv {
  return Object.fromEntries(
    Object.entries(process.env).filter(([name]) => !/^npm_(config_(local_)?prefix|package_|lifecycle_)/i.test(name)),
  );
}

/** The Node that all agents run on, ours too: the peers', which need a recent one, if it is installed. */
export function agentNode(): string {
  const platform = `${process.platform}-${process.arch}`;
  for (const name of [`node-${platform}`, `node-bin-${platform}`]) {
    const path = join(MODULES, name, 'bin', 'node');
    if (existsSync(path)) return path;
  }
  return process.execPath;
}

/** Version of an installed package; of ours, out of the workspace. */
export function versionOf(name: string): string {
  const path = name.startsWith('@leasehold/') ? join(ROOT, 'libs', 'lease') : join(MODULES, name);
  return (JSON.parse(readFileSync(join(path, 'package.json'), 'utf8')) as { version: string }).version;
}
