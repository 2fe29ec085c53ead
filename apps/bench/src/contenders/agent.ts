import type { Adapter } from './contender';
import { Adding } from './agent-adding';
import { Working } from './agent-working';
import type { CommandName, Commands, Reply, Request } from './protocol';

/**
 * A process that does with one contender what its parent says. The parent measures; here are only the counters and clocks that
 * cannot be read from outside. Arguments: the module with the adapter, as a file URL.
 */

/** Often enough that the end of a drain of half a second is seen within two per cent. */
const PROGRESS_MS = 10;

// Ctrl-C reaches the whole group: it is the parent's to answer. When the parent is gone, nobody needs this process.
process.on('SIGINT', () => undefined);
process.on('SIGHUP', () => undefined);
process.on('disconnect', () => process.exit(1));

type Handlers = { [K in CommandName]: (args: Commands[K]['args']) => Promise<Commands[K]['result']> };

function send(reply: Reply): void {
  if (process.connected) process.send?.(reply, undefined, undefined, () => undefined);
}

async function main(adapterUrl: string): Promise<void> {
  const { adapter } = (await import(adapterUrl)) as { adapter: Adapter };
  let url = '';
  const adding = new Adding(adapter, () => url);
  const working = new Working(adapter, () => url);
  const progress = () => ({ ...working.progress, added: adding.streamed });

  const handlers: Handlers = {
    describe: () => Promise.resolve(adapter.about),
    target: (args) => Promise.resolve(void (url = args.url)),
    setup: () => adapter.setup(url),
    startProducer: ({ callers }) => adding.start(callers),
    stopProducer: () => adding.stop(),
    fill: (options) => adding.fill(options),
    fillHead: ({ kind, count }) => adding.fillHead(kind, count),
    addFor: ({ callers, seconds }) => adding.addFor(callers, seconds),
    bulkFor: ({ batch, seconds }) => adding.bulkFor(batch, seconds),
    openLoop: ({ rate, seconds, from }) => adding.openLoop(rate, seconds, from),
    startStream: ({ rate, batch }) => Promise.resolve(adding.startStream(rate, batch)),
    stopStream: () => adding.stopStream(),
    remaining: () => adapter.remaining(url),
    startWorker: (options) => working.start(options),
    stopWorker: () => working.stop(),
    stats: () => Promise.resolve({ ...working.stats(), added: adding.streamed }),
    starts: () => Promise.resolve(working.starts),
    loops: ({ loops, seconds }) => working.loops(loops, seconds),
  };

  process.on('message', ({ id, command, args }: Request) => {
    (handlers[command] as (args: unknown) => Promise<unknown>)(args).then(
      (result) => send({ id, ok: true, result }),
      (error: unknown) => send({ id, ok: false, error: error instanceof Error ? error.message : String(error) }),
    );
  });
  let sent = '';
  setInterval(() => {
    const now = progress();
    const key = `${now.started} ${now.added}`;
    if (key === sent) return;
    sent = key;
    send({ progress: now });
  }, PROGRESS_MS);
  send({ progress: progress() });
}

main(process.argv[2] ?? '').catch((error: unknown) => {
  console.error(error);
  process.exit(1);
});
