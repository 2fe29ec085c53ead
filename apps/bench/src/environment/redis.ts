import { type ChildProcess, execFileSync, fork } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync } from 'node:fs';
import { connect, createServer, type AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';

/** How Redis keeps the jobs; it stands beside every figure of it. */
export const REDIS_SETTINGS = 'appendonly no, save "": not durable, a crash of Redis loses the jobs';

const START_MS = 10_000;

export interface Redis {
  url: string;
  pid: number;
  version: string;
  stop(): Promise<void>;
}

/** Version of the redis-server on the PATH; undefined without one. */
export function redisVersion(): string | undefined {
  try {
    return /v=(\S+)/.exec(execFileSync('redis-server', ['--version'], { encoding: 'utf8' }))?.[1];
  } catch {
    return undefined;
  }
}

/** A Redis of the benchmark's own, on a free port, in a temporary folder. */
export async function startRedis(version: string): Promise<Redis> {
  const port = await freePort();
  const folder = mkdtempSync(join(tmpdir(), 'leasehold-redis-'));
  const guard = fork(join(__dirname, 'redis-guard.js'), [String(port), folder], {
    execArgv: [],
    stdio: ['ignore', 'ignore', 'inherit', 'ipc'],
  });
  const stop = (): Promise<void> => stopGuard(guard);
  try {
    const [message] = (await Promise.race([
      once(guard, 'message'),
      once(guard, 'exit').then(() => Promise.reject(new Error('redis-server did not start'))),
    ])) as [{ pid: number }];
    await untilOpen(port);
    return { url: `redis://127.0.0.1:${port}`, pid: message.pid, version, stop };
  } catch (error) {
    await stop();
    throw error;
  }
}

async function stopGuard(guard: ChildProcess): Promise<void> {
  if (guard.exitCode !== null || guard.signalCode !== null) return;
  const exited = once(guard, 'exit');
  guard.kill('SIGTERM');
  await exited;
}

async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  server.close();
  await once(server, 'close');
  return port;
}

async function untilOpen(port: number): Promise<void> {
  for (const beganAt = performance.now(); performance.now() - beganAt < START_MS;) {
    const socket = connect(port, '127.0.0.1');
    const open = await new Promise<boolean>((resolve) => {
      socket.once('connect', () => resolve(true));
      socket.once('error', () => resolve(false));
    });
    socket.destroy();
    if (open) return;
    await sleep(20);
  }
  throw new Error(`redis-server does not answer on port ${port}`);
}
