import { BatchesService, JobsService } from '@leasehold/nestjs';
import { NestFactory } from '@nestjs/core';
import { ApiModule } from './api.module';

/** The API of this process, listening on a free port of 127.0.0.1. */
export interface Api {
  jobs: JobsService;
  batches: BatchesService;
  /** Where its routes begin. */
  url: string;
  close(): Promise<void>;
}

export async function startApi(databaseUrl: string, schema: string): Promise<Api> {
  const app = await NestFactory.create(ApiModule.forRoot(databaseUrl, schema), {
    logger: ['error', 'fatal'],
    abortOnError: false,
    forceCloseConnections: true,
  });
  try {
    await app.listen(0, '127.0.0.1');
    return {
      jobs: app.get(JobsService),
      batches: app.get(BatchesService),
      url: `${await app.getUrl()}/leasehold`,
      close: () => app.close(),
    };
  } catch (error) {
    await app.close().catch(() => undefined);
    throw error;
  }
}
